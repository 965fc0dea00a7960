"""Values of rewards that are no numbers: which reward divided by zero or gave NaN or infinity, and for which row.

They are abstentions and harm nothing (`alignment.rewards`); this is for whoever wants to mend the reward.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.rewards.matrix import RewardMatrix
from alignment.skipped import origin

KEPT = 32
"""Most values of a rank that are described; all are counted in the reward's faults."""


class RewardMishaps:
    """Those since the last `take`."""

    def __init__(self) -> None:
        self._own: list[dict[str, Any]] = []
        self._lost = 0  # values that any rank lost, of whatever kind

    def note(self, batch: GroupBatch, matrix: RewardMatrix) -> None:
        """Take in what the rewards gave for a batch's completions."""
        self._lost += matrix.lost
        for mishap in matrix.mishaps[: KEPT - len(self._own)]:
            place = origin(batch, mishap.completion)
            self._own.append({"reward": mishap.reward, "message": mishap.message, **place})

    def take(self) -> list[dict[str, Any]]:
        """Of all ranks: `reward`, `message`, `rank`, and where it was (`skipped.origin`). A collective, and only one
        where some rank lost a value."""
        if not self._lost:
            return []
        parts: list[Any] = distributed.all_gather_objects(self._own)
        self._own, self._lost = [], 0
        return [{**each, "rank": rank} for rank, part in enumerate(parts) for each in part]


@runtime_checkable
class HasMishaps(Protocol):
    """A module with rewards: `alignment.online.OnlineMixin`."""

    mishaps: RewardMishaps
