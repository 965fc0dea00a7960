"""What an online algorithm tells and asks its prompts: success for grading, and other prompts in place of groups that
gave no signal (dynamic sampling, DAPO: Yu et al. 2025, arXiv 2503.14476)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import Group, GroupBatch

DIFFICULTY = "difficulty"
"""The data column that names a prompt's stratum."""


SEAT = "seat"
"""Row tensor of a batch that dynamic sampling filled: the place of the completion's prompt among all that were sampled
for the batch, on all ranks."""


@runtime_checkable
class PromptSource(Protocol):
    """A data module of prompts, as `datamodules.PromptData`."""

    def observe(self, batch: GroupBatch, success: Tensor) -> None:
        """Take in how well the model did: success [N] in [0, 1], NaN where unknown. A collective."""

    def refill(self, *, step: int, attempt: int, lacking: Mapping[str, int], exclude: Collection[int]) -> list[Group]:
        """Other prompts, at most `lacking[stratum]` of each stratum and none of the dataset positions in `exclude`. A
        pure function of its arguments and of the grades: the same on every rank."""
        ...


@runtime_checkable
class ReadsPrompts(Protocol):
    """A data module that makes prompts of rows from elsewhere, as `datamodules.PromptData`."""

    def read_prompts(
        self, lines: Sequence[tuple[str, str]], name: str, required: Collection[str]
    ) -> tuple[list[Group], list[str]]:
        """(prompts without an index, what is wrong with each of the other rows). A pure function of its arguments.

        Args:
            lines: (place, JSON) of each row. name: where they are from.
            required: columns that a row cannot be used without.
        """
        ...


def prompts_of(batch: GroupBatch) -> list[Group]:
    """P groups without completions: what a rollout starts from."""
    prompts = torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())
    columns = batch.columns or ({},) * batch.num_prompts
    return [
        Group(prompt=ids.tolist(), completions=(), columns=values, index=int(index))
        for ids, values, index in zip(prompts, columns, batch.group_index.tolist(), strict=True)
    ]


def strata_of(batch: GroupBatch) -> list[str]:
    """P names of strata, "" where prompts have none."""
    return [str(columns.get(DIFFICULTY, "")) for columns in batch.columns or ({},) * batch.num_prompts]


def concatenate(batches: Sequence[GroupBatch]) -> GroupBatch:
    """The groups of all batches (at least one) in one, in order. Those that hold any must have the same named rows and
    tokens."""
    batches = [b for b in batches if b.num_prompts] or list(batches[:1])
    first, counts = batches[0], [b.num_prompts for b in batches]
    names = ("prompt_ids", "prompt_lengths", "completion_ids", "completion_lengths", "scored", "weights")
    tensors = {n: torch.cat([getattr(b, n) for b in batches]) for n in (*names, "group_index", "group_key")}
    before = [sum(counts[:i]) for i in range(len(counts))]
    return replace(
        first,
        **tensors,
        group_of=torch.cat([b.group_of + n for b, n in zip(batches, before, strict=True)]),
        rows={k: torch.cat([b.rows[k] for b in batches]) for k in first.rows},
        tokens={k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens},
        columns=tuple(c for b in batches for c in b.columns),
    )


Roll = Callable[[Sequence[Group], int], tuple[GroupBatch, Tensor]]
"""roll(prompts of this rank, attempt) -> (their completions, [P] bool: some reward differs within the group)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A batch after dynamic sampling.

    Args:
        batch: this rank's groups that give a signal, with the row tensor `seat`.
        sampled, dropped: groups of all ranks that completions were sampled for, and that gave no signal.
        lacking: groups of all ranks still missing when the attempts, or the prompts, ran out.
    """

    batch: GroupBatch
    sampled: int
    dropped: int
    lacking: int


def fill(prompts: Sequence[Group], roll: Roll, source: PromptSource, *, step: int, attempts: int) -> Filled:
    """Sample until every prompt's place is taken by a group with a signal, or `attempts` refills have been tried.

    A group without one is replaced by another prompt of its stratum, so the mix stays. Each refill asks for exactly
    what lacks, over all ranks, and is dealt out evenly. A collective: every rank calls it, with any number of prompts.

    Args:
        prompts: this rank's. roll: samples and rewards; called on every rank, also with no prompt.
        step: keys the refills. attempts: 0 only drops.
    """
    parts: list[GroupBatch] = []
    tried: set[int] = set()
    sampled = dropped = lacking = 0
    for attempt in range(attempts + 1):
        batch, keep = roll(prompts, attempt)
        seats = sampled + distributed.rank() + distributed.world_size() * batch.group_of
        parts.append(batch.with_rows(**{SEAT: seats.double()}).select_groups(keep.nonzero()[:, 0]))
        dead = [name for name, kept in zip(strata_of(batch), keep.tolist(), strict=True) if not kept]
        wanted: Counter[str] = Counter()
        reports: Any = distributed.all_gather_objects((batch.group_index.tolist(), dead))
        for index, names in reports:
            tried.update(index)
            wanted.update(names)
            sampled += len(index)
        dropped += wanted.total()
        if attempt == attempts:
            lacking += wanted.total()
            break
        fresh = source.refill(step=step, attempt=attempt + 1, lacking=wanted, exclude=tried) if wanted else []
        lacking += wanted.total() - len(fresh)
        if not fresh:
            break
        prompts = fresh[distributed.rank() :: distributed.world_size()]
    return Filled(batch=concatenate(parts), sampled=sampled, dropped=dropped, lacking=lacking)
