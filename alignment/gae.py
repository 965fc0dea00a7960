"""Advantages of tokens, with a critic: rewards on tokens, GAE, whitening. Shapes: N completions, C tokens (legend of
`alignment.batches`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignment import distributed
from alignment.advantages import FLAT
from alignment.batches import GroupBatch


def token_rewards(batch: GroupBatch, scores: Tensor, penalty: Tensor | None = None) -> Tensor:
    """[N] scores -> [C] rewards: each score on the last scored token of its completion, minus `penalty` [C] (for
    example beta k1) on every scored token; 0 elsewhere. A NaN score adds nothing, an empty completion has no place.
    """
    rewards = torch.zeros(len(batch.completion_ids), dtype=torch.float32, device=batch.device)
    if penalty is not None:
        rewards = torch.where(batch.scored, rewards - penalty, rewards)
    place = torch.where(batch.scored, torch.arange(len(rewards), device=batch.device), -1)
    last = torch.full((batch.num_completions,), -1, dtype=torch.int64, device=batch.device)
    last = last.scatter_reduce(0, batch.row_of(), place, "amax")
    used = (last >= 0) & ~scores.isnan()
    return rewards.index_add(0, last[used], scores[used].to(rewards.dtype))


def gae(
    batch: GroupBatch, rewards: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every scored token, each [C] float32 and 0 at unscored tokens.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    t + 1 is the next *scored* token of the completion; after the last one V and A are 0. Schulman et al. 2016
    (arXiv 1506.02438).

    Args:
        rewards: [C]. values: [C], the value of the state before each token; anything at unscored tokens.
    """
    lengths = batch.scored_lengths()
    width = int(lengths.max()) if len(lengths) else 0
    row = batch.row_of()[batch.scored]
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(len(row), device=batch.device) - starts[row]
    grid = torch.zeros(2, width + 1, batch.num_completions, dtype=torch.float64, device=batch.device)
    grid[0, column, row] = rewards.detach()[batch.scored].double()
    grid[1, column, row] = values.detach()[batch.scored].double()
    reward, value = grid
    advantage = torch.zeros_like(value)
    for t in reversed(range(width)):  # beyond a completion's end the grid holds 0: what follows its last token
        delta = reward[t] + gamma * value[t + 1] - value[t]
        advantage[t] = delta + gamma * lam * advantage[t + 1]
    return _place(batch, advantage[column, row]), _place(batch, (advantage + value)[column, row])


def _place(batch: GroupBatch, scored_values: Tensor) -> Tensor:
    out = torch.zeros(len(batch.completion_ids), dtype=torch.float32, device=batch.device)
    out[batch.scored] = scored_values.float()
    return out


def whiten(values: Tensor, scored: Tensor, *, eps: float = 1e-8) -> Tensor:
    """[C] -> (values - mean) / sqrt(var + eps) over the scored tokens of all ranks (ddof 1), 0 elsewhere. A collective.

    Equal values and a single value give 0.
    """
    kept = torch.where(scored, values, 0.0).double()
    count, total = distributed.all_reduce_sum(torch.stack([scored.sum().double(), kept.sum()]))
    mean = total / count.clamp(min=1)
    centred = torch.where(scored, kept - mean, 0.0)
    squares, largest = distributed.all_reduce_sum((centred**2).sum()), centred.abs().max() if len(centred) else mean * 0
    flat = not distributed.any_rank(bool(largest > FLAT * mean.abs().clamp(min=1)), values.device)
    variance = squares / (count - 1).clamp(min=1)
    return torch.zeros_like(values) if flat else (centred / (variance + eps).sqrt()).to(values.dtype)
