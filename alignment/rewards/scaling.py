"""From what rewards gave to what is trained on: scales to [0, 1] and conditions, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from alignment import distributed
from alignment.rewards.protocol import RewardSpec

Extremes = dict[str, tuple[float, float]]
"""Reward name -> its smallest and largest value."""
Losses = dict[str, tuple[int, int]]
"""Reward name -> (completions lost to faults, completions scored)."""


class Scaling:
    """Applies the scale and then the condition of each reward. State: the ranges of running scales."""

    def __init__(self, specs: Mapping[str, RewardSpec]) -> None:
        self._specs = specs
        self._ranges: Extremes = {}

    def __call__(self, raw: Tensor, extremes: Extremes, *, learn: bool) -> Tensor:
        """[N, K] values as given -> [N, K] values to train on, NaN staying NaN.

        `extremes` are those of this batch over all ranks; with `learn` they widen the running ranges for good. Without
        it they are used only where no range is known yet.
        """
        names = list(self._specs)
        scaled = [self._scaled(name, raw[:, k], extremes.get(name), learn) for k, name in enumerate(names)]
        for k, spec in enumerate(self._specs.values()):
            if spec.condition is not None:
                other = raw[:, names.index(spec.condition.reward)]
                scaled[k] = gate(scaled[k], other, spec.condition.at_least)
        return torch.stack(scaled, dim=1)

    def _scaled(self, name: str, column: Tensor, extremes: tuple[float, float] | None, learn: bool) -> Tensor:
        scale = self._specs[name].scale
        if isinstance(scale, tuple):
            return rescale(column, *scale)
        if scale is None:
            return column
        known = self._ranges.get(name)
        if extremes is not None and (learn or known is None):
            known = (min(extremes[0], known[0]), max(extremes[1], known[1])) if known else extremes
        if known is None:  # nothing but abstentions so far
            return column
        if learn:
            self._ranges[name] = known
        return rescale(column, *known)

    def state_dict(self) -> dict[str, Any]:
        return {name: list(ends) for name, ends in self._ranges.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ranges of rewards that are no longer there are forgotten."""
        self._ranges = {n: (float(low), float(high)) for n, (low, high) in state.items() if n in self._specs}


def rescale(values: Tensor, low: float, high: float) -> Tensor:
    """Affine map of [low, high] to [0, 1], values outside clipped; 0.5 everywhere when there is no range."""
    if high <= low:
        return torch.where(torch.isnan(values), values, torch.full_like(values, 0.5))
    return ((values - low) / (high - low)).clamp(0.0, 1.0)


def gate(values: Tensor, other: Tensor, at_least: float) -> Tensor:
    """values * 1[other >= at_least] (GDPO, arXiv 2601.05242, equation 8); NaN where either is NaN."""
    gated = torch.where(other >= at_least, values, torch.zeros_like(values))
    return torch.where(torch.isnan(values) | torch.isnan(other), torch.full_like(values, torch.nan), gated)


def extremes_of(names: Sequence[str], raw: Tensor) -> Extremes:
    """Smallest and largest value of each column that has any."""
    found: Extremes = {}
    for k, name in enumerate(names):
        given = raw[:, k][~torch.isnan(raw[:, k])]
        if given.numel():
            found[name] = (float(given.min()), float(given.max()))
    return found


def agree(extremes: Extremes, losses: Losses) -> tuple[Extremes, Losses]:
    """Both over all ranks, so that every rank scales alike and stops at the same batch. A collective."""
    together: Extremes = {}
    total: Losses = {}
    for part in distributed.all_gather_objects((extremes, losses)):
        theirs, counts = cast(tuple[Extremes, Losses], part)
        for name, (low, high) in theirs.items():
            known = together.get(name, (low, high))
            together[name] = (min(low, known[0]), max(high, known[1]))
        for name, (lost, scored) in counts.items():
            before = total.get(name, (0, 0))
            total[name] = (lost + before[0], scored + before[1])
    return together, total
