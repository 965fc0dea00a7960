"""Whether the numbers a rollout left behind are finite, before anything is learned from them.

Not every one of them reaches a loss: a NaN among the values is whitened to advantages of 0, one in a divergence that a
reward is charged with looks like an abstention. Either would train on nothing, in silence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.experience import ADVANTAGE

ADVANTAGES = "advantages"
"""Token tensor of modules with a critic (`alignment.actor_critic`), which builds on this file."""


def measured_fault(batch: GroupBatch) -> Tensor:
    """[] bool: whether something measured at scored tokens is not finite. No synchronisation."""
    return _any(batch, [values for values in batch.tokens.values() if values.is_floating_point()])


def advantage_fault(batch: GroupBatch) -> Tensor:
    """[] bool: whether an advantage is not finite, of a completion or at a scored token. No synchronisation."""
    found = _any(batch, [values for name, values in batch.tokens.items() if name.partition("/")[0] == ADVANTAGES])
    for name, values in batch.rows.items():
        if name.partition("/")[0] == ADVANTAGE:
            found = found | ~values.isfinite().all()
    return found


def _any(batch: GroupBatch, tensors: list[Tensor]) -> Tensor:
    found = torch.zeros((), dtype=torch.bool, device=batch.device)
    for values in tensors:
        found = found | (~values.isfinite() & batch.scored).any()
    return found
