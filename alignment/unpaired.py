"""What learning from labelled completions needs: losses of single completions, and prompts with others' completions.

N completions, as in `alignment.batches`; r is the log-ratio of a completion, z the baseline they share, both in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import Group, GroupBatch


def kto(log_ratios: Tensor, good: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """[N], [N] bool, [N] -> [N]: 1 - sigmoid(beta (r - z)) of a good completion, 1 - sigmoid(beta (z - r)) of a bad
    one.

    Ethayarajh et al. 2024 (arXiv 2402.01306), equations 7 and 8, without the weights of the two kinds.
    """
    sign = torch.where(good, 1.0, -1.0)
    return torch.sigmoid(-beta * sign * (log_ratios - baseline))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A completion and the prompt it was written for."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    scored: tuple[bool, ...]


def mismatched(batch: GroupBatch) -> GroupBatch:
    """This rank's prompts, each with as many completions as it has, written for other prompts of the batch.

    The completions of the whole batch, over all ranks and in its order, are moved on by one: a completion takes the
    place of the next. Where that one has the same prompt, which it would answer, the place goes to the nearest one
    before it that has not; a place without any stays empty. So the result depends neither on micro-batches nor on
    ranks.

    Every rank calls it, also with an empty batch.
    """
    mine = _groups(batch)
    ranks: list[list[list[_Said]]] = distributed.all_gather_objects(mine)  # type: ignore[assignment]
    world = len(ranks)
    order = [  # ranks take every world-th group of a batch
        (rank, at) for at in range(max(map(len, ranks))) for rank in range(world) if at < len(ranks[rank])
    ]
    rows = [row for rank, at in order for row in ranks[rank][at]]
    partners = partners_of([row.prompt for row in rows])
    first = dict(zip(order, _starts([len(ranks[rank][at]) for rank, at in order]), strict=True))
    groups = []
    for at, group in enumerate(mine):
        start = first[distributed.rank(), at]
        others = [rows[p] for p in partners[start : start + len(group)] if p is not None]
        if others:
            groups.append(
                Group(
                    prompt=group[0].prompt,
                    completions=[other.completion for other in others],
                    scored=[other.scored for other in others],
                )
            )
    return GroupBatch.from_groups(groups).to(batch.device)


def partners_of(prompts: Sequence[tuple[int, ...]]) -> list[int | None]:
    """For each row the nearest one before it, going round, whose prompt is another; None where there is none."""
    found: list[int | None] = []
    for i, prompt in enumerate(prompts):
        before = (j % len(prompts) for j in range(i - 1, i - len(prompts), -1))
        found.append(next((j for j in before if prompts[j] != prompt), None))
    return found


def _starts(lengths: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    return starts


def _groups(batch: GroupBatch) -> list[list[_Said]]:
    """The completions of each group."""
    lengths = batch.completion_lengths.tolist()
    prompts = [tuple(p.tolist()) for p in torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())]
    completions = torch.split(batch.completion_ids, lengths)
    masks = torch.split(batch.scored, lengths)
    out: list[list[_Said]] = [[] for _ in prompts]
    for group, ids, mask in zip(batch.group_of.tolist(), completions, masks, strict=True):
        out[group].append(_Said(prompt=prompts[group], completion=tuple(ids.tolist()), scored=tuple(mask.tolist())))
    return out
