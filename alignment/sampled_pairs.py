"""Preference pairs, made from the scores of a prompt's completions.

A pair is marked in the row tensor `advantage`: 1 for its chosen completion, -1 for its rejected one. So whatever cuts a
batch by prompts keeps it, and metrics of rewards read it as what the completions are taken for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from alignment import distributed
from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.experience import ADVANTAGE


def best_and_worst(table: RewardTable, eligible: Tensor) -> Tensor:
    """[N] 1 for the completion of each group with the highest score, -1 for the one with the lowest, else 0.

    Among equals the first is taken. A group has no pair where its scores are all alike
    (`alignment.advantages.FLAT`) or fewer than two of its eligible completions have one.

    Args:
        table: the rewards; a score is their weighted sum, over those that did not abstain. eligible: [N] bool.
    """
    scores = replace(table, rewards=table.rewards.double()).scores
    scores = torch.where(eligible, scores, torch.nan)
    group, rows = table.group_of, torch.arange(len(scores), device=scores.device)
    known = ~scores.isnan() & ~table.stats(scores).flat[group]
    signal = torch.zeros_like(scores)
    for sign in (1.0, -1.0):
        values = torch.where(known, sign * scores, -torch.inf)
        at = known & (values == table.largest(values)[group])
        none = torch.full((table.groups,), len(rows), dtype=rows.dtype, device=rows.device)
        first = none.scatter_reduce(0, group, torch.where(at, rows, len(rows)), "amin")
        signal[first[first < len(rows)]] = sign
    return signal.float()


def take_pairs(batch: GroupBatch) -> GroupBatch:
    """The pairs of a batch, chosen before rejected, without the groups that have none. A collective.

    When no rank has any, the first two completions of every group with weight 0, so that the gradient is 0 and not
    missing.
    """
    signal = batch.rows[ADVANTAGE]
    chosen, rejected = ((sign * signal > 0).nonzero()[:, 0] for sign in (1, -1))
    if not distributed.any_rank(bool(len(chosen)), batch.device):
        sizes = torch.bincount(batch.group_of, minlength=batch.num_prompts)
        chosen = sizes.cumsum(0) - sizes
        rejected = chosen + 1
        batch = replace(batch, weights=torch.zeros_like(batch.weights))
    return batch.select_rows(torch.stack([chosen, rejected], dim=1).flatten())
