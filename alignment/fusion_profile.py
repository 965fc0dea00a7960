"""Mean fusion weights by place in the completion: what heads are used for, early and late in a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch, within
from alignment.rollout import SamplingConfig


class FusionProfile:
    """Sums over updates, by bins of equal width; the last one also holds what lies beyond it.

    Args:
        names: of all heads. bins: how many. longest: tokens of the longest completion.
    """

    def __init__(self, names: Sequence[str], bins: int, longest: int) -> None:
        self.names, self.bins = tuple(names), min(bins, longest)
        self.width = -(-longest // self.bins)
        self._sums = torch.zeros(self.bins, len(self.names) + 1, dtype=torch.float64)

    def add(self, micro: GroupBatch, active: Sequence[int], alpha: Tensor) -> None:
        """Of a micro-batch: fusion weights [scored, A] of the active heads at its scored tokens."""
        places = (within(micro.completion_lengths)[micro.scored] // self.width).clamp(max=self.bins - 1).cpu()
        rows = torch.zeros(len(places), self._sums.shape[1], dtype=torch.float64)
        rows[:, list(active)] = alpha.detach().double().cpu()
        rows[:, -1] = 1
        known = rows.isfinite().all(dim=1)  # of an update that is left out nothing must stay
        self._sums.index_add_(0, places[known], rows[known])

    def take(self, device: torch.device) -> list[list[float | None]]:
        """Per bin the mean of each head over the tokens of all ranks since the last call; None without any. A
        collective."""
        whole = distributed.all_reduce_sum(self._sums.to(device)).cpu()
        self._sums = torch.zeros_like(self._sums)
        return [[None if row[-1] == 0 else float(v / row[-1]) for v in row[:-1]] for row in whole]


    def state_dict(self, device: torch.device) -> list[list[float]]:
        """Sums over all ranks since the last `take`. A collective."""
        whole: list[list[float]] = distributed.all_reduce_sum(self._sums.to(device)).cpu().tolist()
        return whole

    def load_state_dict(self, sums: Sequence[Sequence[float]]) -> None:
        """Of all ranks, so that one of them has them. Sums of other bins than these are left out."""
        saved = torch.tensor(sums, dtype=torch.float64)
        if saved.shape == self._sums.shape:
            self._sums = saved if distributed.rank() == 0 else torch.zeros_like(saved)


@runtime_checkable
class HasProfile(Protocol):
    """A module that adds its fusion weights to a profile, if a callback set one: `alignment.headed.HeadedMixin`."""

    profile: FusionProfile | None
    sampling: SamplingConfig
