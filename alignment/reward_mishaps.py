"""Values of rewards that are no numbers: which reward divided by zero or gave NaN or infinity, and for which row.

They are abstentions and harm nothing (`alignment.rewards`); this is for whoever wants to mend the reward.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.rewards.matrix import RewardMatrix
from alignment.skipped import origin

KEPT = 8
"""Most messages of one reward that are kept apart: one may say something else for every completion."""


class RewardMishaps:
    """Those since the last `take`: for each reward and message the first place, and how many completions had it."""

    def __init__(self) -> None:
        self._own: dict[tuple[str, str], dict[str, Any]] = {}
        self._lost = 0  # values that any rank lost, of whatever kind

    def note(self, batch: GroupBatch, matrix: RewardMatrix) -> None:
        """Take in what the rewards gave for a batch's completions."""
        self._lost += matrix.lost
        for mishap in matrix.mishaps:
            kind = (mishap.reward, mishap.message)
            if kind in self._own:
                self._own[kind]["count"] += 1
            elif sum(reward == mishap.reward for reward, _ in self._own) < KEPT:
                place = origin(batch, mishap.completion)
                self._own[kind] = {"reward": mishap.reward, "message": mishap.message, "count": 1, **place}

    def take(self) -> list[dict[str, Any]]:
        """Of all ranks: `reward`, `message`, `rank`, `count` there, and where the first was (`skipped.origin`). A
        collective, and only one where some rank lost a value."""
        if not self._lost:
            return []
        parts: list[Any] = distributed.all_gather_objects(list(self._own.values()))
        self._own, self._lost = {}, 0
        return [{**each, "rank": rank} for rank, part in enumerate(parts) for each in part]


@runtime_checkable
class HasMishaps(Protocol):
    """A module with rewards: `alignment.online.OnlineMixin`."""

    mishaps: RewardMishaps
