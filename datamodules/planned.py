"""Batches whose mix and rows change while a run trains: the shares of strata or sources, and a curriculum that begins
with the rows of the highest confidence.

A row is drawn when it has been given least often among those in use; among equals in an order that is drawn anew for
each time. So a whole data set in use is the usual shuffle without replacement, and rows that come into use later are
not behind for long. What comes next is a pure function of (seed, how often each row has been given, mix, fraction,
confidence), all of which is in the checkpoint; every rank draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from alignment.errors import UserError
from alignment.randomness import generator
from alignment.schedulable import Schedulables
from alignment.stages import FRACTION, MIX
from datamodules.loader import BatchOrder, SampleOrder
from datamodules.store import GroupStore
from datamodules.strata import Exhausted, Quota, spread


@dataclass(kw_only=True)
class MixConfig:
    """A fixed mix of the rows of several sources, languages or domains in every batch.

    Args:
        column: the data column that says where a row belongs.
        ratio: each value of the column -> its share of a batch.
        exhausted: what happens when one is used up: "reshuffle" it, or "stop" the epoch.
    """

    column: str
    ratio: dict[str, float]
    exhausted: Exhausted = "reshuffle"

    def __post_init__(self) -> None:
        if not self.ratio:
            raise UserError(f"mix.ratio is empty; give each value of the column '{self.column}' a share")
        Quota(list(self.ratio.values()))

    def labels(self, store: GroupStore) -> np.ndarray:
        """[P] the place of each row's value in `ratio`. Raises UserError for a value without a share."""
        places = {name: k for k, name in enumerate(self.ratio)}
        found = np.zeros(len(store), dtype=np.int64)
        for i, (columns, index) in enumerate(zip(store.columns(), store.row_index, strict=True)):
            value = str(columns[self.column])
            if value not in places:
                raise UserError(
                    f"row {index + 1}: column '{self.column}' holds '{value}', which has no share in mix.ratio "
                    f"({', '.join(places)}); 0 leaves it out"
                )
            found[i] = places[value]
        missing = [name for name, k in places.items() if self.ratio[name] and not (found == k).any()]
        if missing and len(store):
            raise UserError(f"no training row has '{missing[0]}' in column '{self.column}'; give it a share of 0")
        return found


class Draws:
    """Which training rows come next.

    Args:
        labels: [n] stratum of each row; they may change between two batches. names: of the strata, none for one.
        values: holds `data.fraction`, and `data.mix.NAME` for each name.
        seed: of the order. shuffle: False gives the rows in their own order.

    Attributes:
        confidence: [n], or None: then all rows are in use.
    """

    def __init__(
        self, labels: np.ndarray, names: Sequence[str], values: Schedulables, *, seed: int, shuffle: bool = True
    ) -> None:
        self.labels, self.names, self.seed, self.shuffle = labels, list(names), seed, shuffle
        self.counts = np.zeros(len(labels), dtype=np.int64)
        self.confidence: np.ndarray | None = None
        self._values = values
        self._rank = np.arange(len(labels))
        self._carry: list[Fraction] | None = None
        self._before: tuple[list[int], list[Fraction] | None] = ([], None)  # the last batch, and the carry before it
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, size: int) -> list[int]:
        """The next `size` rows, the strata spread evenly."""
        strata = range(max(1, len(self.names)))
        members = [np.flatnonzero(self.labels == k) for k in strata] if self.names else [np.arange(len(self.labels))]
        shares = [float(self._values[MIX + name].value) for name in self.names] or [1.0]
        shares = [share if len(rows) else 0.0 for share, rows in zip(shares, members, strict=True)]
        if not sum(shares):
            raise UserError(f"the mix gives no share to any of {', '.join(self.names)} that has training rows")
        carry = self._carry
        if carry is not None and any(left and not share for left, share in zip(carry, shares, strict=True)):
            carry = None  # one that gives nothing any more owes nothing
        quota = Quota(shares, carry)
        seats = quota.seats(size)
        rows = spread([self._take(self._pool(own), count) for own, count in zip(members, seats, strict=True)])
        self._before, self._carry = (rows, self._carry), quota.carry
        return rows

    def put_back(self) -> None:
        """The batch drawn last was not used."""
        rows, self._carry = self._before
        np.subtract.at(self.counts, rows, 1)
        self._before = ([], self._carry)

    def freeze(self, confidence: np.ndarray) -> None:
        """From now on the rows in use are those of the highest confidence [n], as many as `data.fraction` says of each
        stratum; equal ones in their own order, unknown ones (NaN) last."""
        self.confidence = confidence.astype(np.float64)
        order = np.argsort(-self.confidence, kind="stable")  # NaN is last
        self._rank = np.empty(len(order), dtype=np.int64)
        self._rank[order] = np.arange(len(order))

    def in_use(self, label: int) -> np.ndarray:
        """The rows of a stratum that may be drawn now."""
        return self._pool(np.flatnonzero(self.labels == label) if self.names else np.arange(len(self.labels)))

    def _pool(self, members: np.ndarray) -> np.ndarray:
        fraction = float(self._values[FRACTION].value)
        if fraction >= 1 or not len(members):
            return members
        if self.confidence is None:
            raise UserError(f"{FRACTION} is {fraction:g} and no row has a confidence; only callbacks.Stages gives them")
        count = max(1, math.ceil(fraction * len(members) - 1e-9))
        ranks = self._rank[members]
        kept: np.ndarray = members[ranks <= np.partition(ranks, count - 1)[count - 1]]
        return kept

    def _take(self, pool: np.ndarray, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:  # once, unless there are more seats than rows
            keys, size = self._keys(pool), min(len(pool), count - len(taken))
            first = np.argpartition(keys, size - 1)[:size]  # no two are equal
            part = pool[first[np.argsort(keys[first])]]
            self.counts[part] += 1
            taken += part.tolist()
        return taken

    def _keys(self, pool: np.ndarray) -> np.ndarray:
        """[pool] rising: how often a row was given, then its place in the order of that time."""
        given = self.counts[pool]
        keys: np.ndarray = given.astype(np.float64)
        for time in range(int(given.min()), int(given.max()) + 1):
            mine = given == time
            keys[mine] += self._order(time)[pool[mine]] / len(self.counts)
        return keys

    def _order(self, time: int) -> np.ndarray:
        """[n] the place of each row in the order in which rows are given for the `time`-th time."""
        if not self.shuffle:
            return np.arange(len(self.counts))
        if time not in self._orders:
            self._orders = {t: order for t, order in self._orders.items() if t >= time - 2}
            draw = generator(self.seed, "planned order", time)
            self._orders[time] = torch.randperm(len(self.counts), generator=draw).numpy()
        return self._orders[time]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": torch.from_numpy(self.counts.copy()),
            "carry": None if self._carry is None else [str(left) for left in self._carry],
            "confidence": None if self.confidence is None else torch.from_numpy(self.confidence.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises UserError when the state is of other rows."""
        if len(state["counts"]) != len(self.counts):
            raise UserError(
                f"the checkpoint holds the order of {len(state['counts'])} training rows, the data have "
                f"{len(self.counts)}"
            )
        self.counts = state["counts"].numpy().copy()
        self._carry = None if state["carry"] is None else [Fraction(left) for left in state["carry"]]
        if state["confidence"] is not None:
            self.freeze(state["confidence"].numpy())


class PlannedOrder(BatchOrder):
    """Batches as `Draws` gives them, each drawn when it is asked for; all of them are full.

    Args:
        sampler: says how many rows there are. draws: which rows come next. Others: see BatchOrder.
    """

    def __init__(self, sampler: SampleOrder, draws: Draws, *, batch_size: int, rank: int, world_size: int) -> None:
        super().__init__(sampler, batch_size=batch_size, rank=rank, world_size=world_size)
        self._draws = draws

    def global_batches(self) -> list[list[int]]:
        raise TypeError("batches of a moving mix are not known before they are drawn")

    def batches_from(self, start: int) -> Iterator[list[int]]:
        """Where the run stands is in the draws, not in `start`, which only says how many are left of the epoch."""
        for _ in range(start, len(self)):
            yield self.share(self._draws.batch(self.batch_size))

    def put_back(self) -> None:
        self._draws.put_back()
