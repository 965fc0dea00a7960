"""Batches that mix difficulties in a fixed ratio, exactly: 7 easy, 2 medium, 1 hard, or any other.

Each batch gives every stratum its share of the seats by largest remainder, ties to the easier; what a batch could not
give is carried to the next, so that batches of 1 still see a hard prompt in ten. Within a batch the strata are spread
evenly: each half of it, and each rank's part, has the same mix.

Order is a pure function of (seed, epoch, position) as in `datamodules.loader`, and of the grades where prompts are
graded anew (`datamodules.grading`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from alignment.errors import UserError
from alignment.randomness import generator
from datamodules.grading import Grades
from datamodules.loader import BatchOrder, SampleOrder

log = logging.getLogger(__name__)

Exhausted = Literal["reshuffle", "stop"]


class Quota:
    """Seats of each stratum in one batch after the other.

    Args:
        ratio: one number per stratum, easiest first, at least 0 and not all 0. 0.7 is exactly 7/10.
        carry: what an earlier batch left over, per stratum, in seats.
    """

    def __init__(self, ratio: Sequence[float | Fraction], carry: Sequence[Fraction] | None = None) -> None:
        exact = [Fraction(str(r)) for r in ratio if math.isfinite(r)]
        if not exact or len(exact) < len(ratio) or min(exact) < 0 or sum(exact) == 0:
            raise UserError(f"a ratio needs numbers of at least 0 that are not all 0, got {[str(r) for r in ratio]}")
        self.shares = [r / sum(exact) for r in exact]
        self.carry = [Fraction(0)] * len(exact) if carry is None else list(carry)

    def seats(self, size: int) -> list[int]:
        """How many of the next `size` seats each stratum gets."""
        due = [size * share + left for share, left in zip(self.shares, self.carry, strict=True)]
        seats = [max(0, math.floor(d)) for d in due]
        strata = range(len(due))
        while sum(seats) < size:
            seats[max(strata, key=lambda k: (due[k] - seats[k], -k))] += 1
        while sum(seats) > size:
            seats[min((k for k in strata if seats[k]), key=lambda k: (due[k] - seats[k], -k))] -= 1
        self.carry = [d - s for d, s in zip(due, seats, strict=True)]
        return seats


class Stream:
    """The prompts of one stratum without end: one pass after the other, each in an order of its own.

    A pass that begins inside a batch puts off what that batch already holds, so that no batch asks a prompt twice
    unless it has more seats than the stratum has prompts.
    """

    def __init__(self, members: Sequence[int], *, seed: int, keys: Sequence[int | str], shuffle: bool = True) -> None:
        self._members, self._seed, self._keys, self._shuffle = list(members), seed, keys, shuffle
        self._passes = 0
        self._order: list[int] = []
        self._next = 0

    def take(self, count: int) -> list[int]:
        """The next `count` prompts. There must be one at least."""
        taken: list[int] = []
        while len(taken) < count:
            if self._next == len(self._order):
                self._begin(avoid=set(taken), count=count - len(taken))
            part = self._order[self._next : self._next + count - len(taken)]
            self._next += len(part)
            taken += part
        return taken

    def _begin(self, avoid: set[int], count: int) -> None:
        order = self._members
        if self._shuffle:
            draw = generator(self._seed, "stratum", *self._keys, self._passes)
            order = [self._members[i] for i in torch.randperm(len(self._members), generator=draw).tolist()]
        first = [p for p in order if p not in avoid][:count] if avoid else []
        ahead = set(first)
        self._order = first + [p for p in order if p not in ahead]
        self._next = 0
        self._passes += 1


def spread(parts: Sequence[Sequence[int]]) -> list[int]:
    """The parts in one list, each spread evenly over it: seat by seat the part that is furthest behind."""
    total = sum(len(part) for part in parts)
    given = [0] * len(parts)
    out: list[int] = []
    for seat in range(1, total + 1):
        k = max(range(len(parts)), key=lambda k: (len(parts[k]) * seat - given[k] * total, -k))
        out.append(parts[k][given[k]])
        given[k] += 1
    return out


class DifficultyStratifiedBatchSampler(BatchOrder):
    """Batches with a fixed ratio of strata; a drop-in for `BatchOrder`.

    An epoch has as many batches as without strata; all of them are full. A stratum without a prompt leaves its seats
    to the others, in their ratio.

    Args:
        sampler: says how many prompts there are, the seed and the epoch.
        grades: the stratum of each prompt. Its labels may change between two batches.
        ratio: one number per stratum, easiest first.
        batch_size, rank, world_size, drop_last: see BatchOrder.
        exhausted: "reshuffle" goes through a stratum again when it is used up, also across epochs; "stop" ends the
            epoch before the first batch that a stratum cannot fill, and shuffles all anew.
    """

    def __init__(
        self,
        sampler: SampleOrder,
        grades: Grades,
        *,
        ratio: Sequence[float],
        batch_size: int,
        exhausted: Exhausted = "reshuffle",
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(sampler, batch_size=batch_size, rank=rank, world_size=world_size, drop_last=drop_last)
        if exhausted not in ("reshuffle", "stop"):
            raise UserError(f"exhausted is {exhausted!r}; use reshuffle or stop")
        if exhausted == "stop" and grades.regrading is not None:
            raise UserError("exhausted: stop needs strata that stay; with re-grading use reshuffle")
        if len(grades.labels) != len(sampler) or (len(sampler) and int(grades.labels.max()) >= len(ratio)):
            raise ValueError(
                f"{len(sampler)} prompts in {len(ratio)} strata do not fit labels of {len(grades.labels)} prompts, the "
                f"largest of them {int(grades.labels.max(initial=-1))}"
            )
        self.ratio, self.exhausted, self._grades = list(ratio), exhausted, grades
        Quota(ratio)  # a ratio that is none is an error now, not at the first batch
        self._length = super().__len__() if exhausted == "reshuffle" else self._batches_until_stop()
        if exhausted == "stop" and not self._length:
            raise UserError(
                f"exhausted: stop ends before the first batch: strata of {[len(m) for m in self._members()]} "
                f"prompts cannot fill a batch of {batch_size}"
            )
        self._warn_about_small_strata()
        self._walk: tuple[Quota, list[Stream]] | None = None
        self._walk_of: tuple[int, int] = (-1, -1)  # which streams `_walk` holds: (version of the grades, epoch)
        self._at = 0  # number of the batch that `_walk` would draw next

    def __len__(self) -> int:
        return self._length

    def global_batches(self) -> list[list[int]]:
        """The batches of the current epoch, all ranks together, as the grades are now."""
        return [self._batch(b) for b in range(len(self))]

    def batches_from(self, start: int) -> Iterator[list[int]]:
        """This rank's batches of the current epoch, from the `start`-th on, each drawn when it is asked for."""
        for b in range(start, len(self)):
            if self._grades.start is None:
                self._grades.begin(self._number(b))
            batch = self._batch(b)
            assert self._walk is not None
            self._grades.carry = self._walk[0].carry
            yield self.share(batch)

    # ------------------------------------------------------------------ drawing

    def _epoch(self) -> int:
        stays = not self.sampler.shuffle and self._grades.regrading is None  # the same batches in every epoch
        return 0 if stays else self.sampler.epoch

    def _number(self, b: int) -> int:
        """Of batch b of the current epoch, counted from the first batch of the run."""
        return self._epoch() * len(self) + b

    def _batch(self, b: int) -> list[int]:
        """Batch b of the current epoch, all ranks together."""
        number, stop, start = self._number(b), self.exhausted == "stop", self._grades.start
        begin = number - b if stop else number if start is None else start
        walk_of = (self._grades.version, self._epoch() if stop else 0)
        if self._walk is None or walk_of != self._walk_of or self._at > number:
            self._walk, self._walk_of, self._at = self._begin(walk_of), walk_of, begin
        while True:
            quota, streams = self._walk
            parts = [stream.take(n) for stream, n in zip(streams, quota.seats(self.batch_size), strict=True)]
            self._at += 1
            if self._at > number:
                return spread(parts)

    def _begin(self, walk_of: tuple[int, int]) -> tuple[Quota, list[Stream]]:
        members = self._members()
        ratio = [r if len(m) else 0 for r, m in zip(self.ratio, members, strict=True)]
        carry = self._grades.start_carry
        if carry is not None and any(left and not r for left, r in zip(carry, ratio, strict=True)):
            carry = None  # a stratum has lost all of its prompts and can give nothing back
        streams = [
            Stream(m.tolist(), seed=self.sampler.seed, keys=(*walk_of, k), shuffle=self.sampler.shuffle)
            for k, m in enumerate(members)
        ]
        return Quota(ratio, carry), streams

    def _members(self) -> list[np.ndarray]:
        return [np.flatnonzero(self._grades.labels == k) for k in range(len(self.ratio))]

    # ------------------------------------------------------------------ sizes

    def _batches_until_stop(self) -> int:
        quota, left = Quota(self.ratio), [len(m) for m in self._members()]
        batches = 0
        while True:
            left = [have - need for have, need in zip(left, quota.seats(self.batch_size), strict=True)]
            if min(left) < 0:
                return batches
            batches += 1

    def _warn_about_small_strata(self) -> None:
        shares = Quota(self.ratio).shares
        for k, members in enumerate(self._members()):
            most = math.ceil(self.batch_size * shares[k])
            if 0 < len(members) < most:
                text = "stratum %d has %d prompts for up to %d seats of a batch: some batches ask a prompt twice"
                log.warning(text, k, len(members), most)


class CurriculumOrder(SampleOrder):
    """Easy prompts first in every epoch, shuffled within their stratum.

    Args:
        labels: [size] stratum of each prompt, 0 the easiest.
        seed, shuffle: see SampleOrder.
    """

    def __init__(self, labels: np.ndarray, *, seed: int = 0, shuffle: bool = True) -> None:
        super().__init__(len(labels), seed=seed, shuffle=shuffle)
        self._labels = torch.from_numpy(np.asarray(labels, dtype=np.int64))

    def order(self) -> torch.Tensor:
        order = super().order()
        return order[self._labels[order].argsort(stable=True)]
