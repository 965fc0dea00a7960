"""The control for gradient routing."""

from __future__ import annotations

from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.experience import ADVANTAGE
from modules import DecoupledPO


class OneRoute(DecoupledPO):
    """DecoupledPO whose heads all learn from the combined advantage."""

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        found = super().credit(batch, table)
        return found.with_rows(**{f"{ADVANTAGE}/{name}": found.rows[ADVANTAGE] for name in self.suite.names})
