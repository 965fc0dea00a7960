"""Several rewards as one score, before anything is normalised.

    weighted_sum        s =  sum_k w_k r_k
    chebyshev           s = -max_k w_k (z_k - r_k)
    smooth_chebyshev    s = -mu log sum_k exp(w_k (z_k - r_k) / mu)

z is the ideal point: the best each reward can be, or has been so far. A weighted sum lets one reward pay for another
and cannot reach a front where it bends inwards; Chebyshev's score is that of the reward that lacks most, and reaches
every point of a front for some w (in reinforcement learning: Van Moffaert et al. 2013). The smooth form, within
mu log K of the plain one, is Lin et al. 2024 (arXiv 2402.19078). There the objectives are losses of a model; here the
score is that of one completion.

To add one, write a function of [N, K] rewards, [N, K] weights and [K] ideal that returns [N], and name it by its import
path or register it with `@SCALARISATIONS.register("name")`. Rewards that abstained are NaN and must not enter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alignment import distributed
from alignment.errors import UserError
from alignment.named import Registry

ScalariseFn = Callable[..., Tensor]
"""fn(rewards [N, K], weights [N, K], ideal [K], *, settings) -> [N] scores."""

SCALARISATIONS: Registry[ScalariseFn] = Registry("scalarisation")


@SCALARISATIONS.register("weighted_sum")
def weighted_sum(rewards: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    """sum_k w_k r_k over the rewards that apply."""
    return torch.where(rewards.isnan(), 0.0, rewards * weights).sum(1)


@SCALARISATIONS.register("chebyshev")
def chebyshev(rewards: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    """-max_k w_k (z_k - r_k) over the rewards that apply and have a weight."""
    return -_shortfalls(rewards, weights, ideal).amax(1)


@SCALARISATIONS.register("smooth_chebyshev")
def smooth_chebyshev(rewards: Tensor, weights: Tensor, ideal: Tensor, *, mu: float = 0.1) -> Tensor:
    """-mu log sum_k exp(w_k (z_k - r_k) / mu) over the rewards that apply and have a weight; mu -> 0 is the plain
    form."""
    if not mu > 0:
        raise UserError(f"mu is {mu}; it must be above 0 (chebyshev is its limit at 0)")
    return -mu * torch.logsumexp(_shortfalls(rewards, weights, ideal) / mu, dim=1)


def _shortfalls(rewards: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    """[N, K] w_k (z_k - r_k); -inf where it does not count."""
    return torch.where(rewards.isnan() | (weights <= 0), -torch.inf, weights * (ideal - rewards))


class Scalariser:
    """One scalarisation with its settings and the ideal point.

    Args:
        method: name or import path. settings: its keyword arguments. names: of the K rewards.
        ideal: name -> z_k. For rewards without one it is the largest value seen in training so far.

    Raises UserError for names and settings that do not exist.
    """

    def __init__(
        self,
        method: str,
        settings: Mapping[str, Any] | None,
        names: Sequence[str],
        ideal: Mapping[str, float] | None = None,
    ) -> None:
        self._fn = SCALARISATIONS.get(method, settings)
        self.names, given = tuple(names), dict(ideal or {})
        if unknown := sorted(set(given) - set(names)):
            raise UserError(f"ideal names {', '.join(unknown)}, no reward; there are {', '.join(names)}")
        self._given = torch.tensor([name in given for name in names])
        self.ideal = torch.tensor([float(given.get(name, -math.inf)) for name in names], dtype=torch.float64)

    def __call__(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """[N, K], [N, K] -> [N] scores, NaN where no reward with a weight applies. A collective: the rewards of all
        ranks may move the ideal point, and it moves before it is used."""
        rewards, weights = rewards.double(), weights.double()
        mine = torch.where(rewards.isnan(), -torch.inf, rewards)
        best = torch.cat([mine.cpu(), self.ideal[None]]).amax(0)
        everyone = torch.stack(distributed.all_gather_objects(best))  # type: ignore[arg-type]
        self.ideal = torch.where(self._given, self.ideal, everyone.amax(0))
        counts = ~rewards.isnan() & (weights > 0)
        known = counts.any(1)
        # Where nothing counts some value must stand, so that a method sees no empty maximum.
        scores = self._fn(
            torch.where(known[:, None], rewards, 0.0),
            torch.where(known[:, None], weights, 1.0),
            self.ideal.clamp(min=torch.finfo(torch.float32).min).to(rewards.device),
        )
        if scores.shape != known.shape:
            raise ValueError(
                f"the scalarisation returned {tuple(scores.shape)} for {len(known)} completions; it must return one "
                "score per completion"
            )
        return torch.where(known, scores, torch.nan)

    def state_dict(self) -> dict[str, Any]:
        return {"ideal": dict(zip(self.names, self.ideal.tolist(), strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The best values of rewards that are still there and have no ideal of their own."""
        for k, name in enumerate(self.names):
            if not self._given[k] and name in state["ideal"]:
                self.ideal[k] = float(state["ideal"][name])
