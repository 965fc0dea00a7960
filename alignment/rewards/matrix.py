"""What rewards gave for a batch: one number or an abstention per completion and reward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.metrics import Metrics, mean_of


class Mishap(NamedTuple):
    """A value that is no number: NaN, infinite, or of a division by zero."""

    reward: str
    completion: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMatrix:
    """N completions under K rewards.

    Args:
        values: [N, K] float32, NaN where the reward abstained, of itself or by a fault; scaled and conditioned.
        raw: [N, K] float32 as the rewards gave them.
        names: K names. weights: [K] float32.
        changed: names whose `values` may differ from `raw`: they have a scale or a condition.
        faults: reward name -> completions lost by each kind of fault, on this rank.
        seconds: reward name -> seconds its calls took, added over workers.
        mishaps: values of this rank that are no numbers, all of them faults too.
        lost: values lost to faults, over all rewards and ranks.
    """

    values: Tensor
    raw: Tensor
    names: tuple[str, ...]
    weights: Tensor
    changed: frozenset[str]
    faults: dict[str, Counter[str]]
    seconds: dict[str, float]
    mishaps: tuple[Mishap, ...] = ()
    lost: int = 0

    @property
    def valid(self) -> Tensor:
        """[N, K] bool: where there is a value."""
        return ~torch.isnan(self.values)

    def total(self) -> Tensor:
        """[N] float32: sum of weight times value over the rewards that did not abstain; NaN where all did."""
        valid = self.valid
        total = torch.where(valid, self.values * self.weights, torch.zeros_like(self.values)).sum(dim=1)
        return torch.where(valid.any(dim=1), total, torch.full_like(total, torch.nan))

    def metrics(self) -> Metrics:
        """`rewards/<name>/mean`, `std` (unbiased, of the batch), `abstained` and `faults` (shares of completions), and
        `raw_mean` before scaling and condition, where there are any."""
        metrics: Metrics = {}
        one = torch.ones((), dtype=torch.float64)
        size = float(self.values.shape[0]) * one
        for k, name in enumerate(self.names):
            values, valid = self.values[:, k], self.valid[:, k]
            prefix = f"rewards/{name}"
            metrics[f"{prefix}/mean"] = mean_of(values, valid)
            if int(valid.sum()) > 1:
                metrics[f"{prefix}/std"] = (values[valid].double().std(), one)
            metrics[f"{prefix}/abstained"] = ((~valid).sum().double(), size)
            metrics[f"{prefix}/faults"] = (float(self.faults[name].total()) * one, size)
            if name in self.changed:
                raw = self.raw[:, k]
                metrics[f"{prefix}/raw_mean"] = mean_of(raw, ~torch.isnan(raw))
        return metrics
