"""Batches of rows that arrive while a run trains, and of old ones among them.

A new row is trained on once, in the order of arrival, or held out for validation for good, by a digest of its prompt.
Old rows come from a memory that is a fair sample of all rows trained on so far (reservoir sampling, Vitter 1985; as
experience replay: Chaudhry et al. 2019, arXiv 1902.10486). Every rank has the same rows in the same order; rank 0 reads
and tells the others. What comes next is a pure function of what has arrived, the seed and the state, which is all in
the checkpoint: memory and held-out rows too, so a file that is rotated away takes nothing from them.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from alignment import distributed
from alignment.batches import Group
from alignment.chat import TemplateRefused
from alignment.errors import UserError
from alignment.feedback import (
    Feedback,
    Places,
    Row,
    Silence,
    as_state,
    described,
    from_state,
    left_out,
    told_by_first,
    under_way,
    withdrawn,
)
from alignment.randomness import generator
from datamodules.rows import RowError, RowReport
from datamodules.splits import LEAKED

log = logging.getLogger(__name__)

SURPLUS = "held out beyond max_eval_rows"

Next = Literal["round", "old", "wait", "end"]


@dataclass(kw_only=True)
class FollowConfig:
    """How rows that keep arriving are followed.

    Args:
        table: of an sqlite file. Null: its only one.
        rows: new rows that training on them begins with, at least; fewer wait for more.
        quiet: seconds without a new row after which it takes what is there and ends the run. Null: it never ends so.
        wait: train on nothing but new rows and the old ones among them. False: on old rows alone while there are none.
        every: batches from one look at what has arrived to the next, while it trains on old rows.
        replay: share of old rows in a batch, 0 to below 1.
        memory: old rows that are kept to draw from.
        epoch: batches that the Trainer takes for an epoch: by default validation comes at its end.
        poll: seconds between two looks while it waits.
    """

    table: str | None = None
    rows: int = 1
    quiet: float | None = None
    wait: bool = True
    every: int = 10
    replay: float = 0.0
    memory: int = 1000
    epoch: int = 100
    poll: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rows", "every", "memory", "epoch"):
            if getattr(self, name) < 1:
                raise UserError(f"data.follow.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.replay < 1:
            raise UserError(f"data.follow.replay is {self.replay}; it is a share of at least 0 and below 1")
        if not 0 < self.poll < math.inf or (self.quiet is not None and not 0 <= self.quiet < math.inf):
            raise UserError(f"data.follow: poll is {self.poll} and quiet {self.quiet}; they are seconds, poll above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A row in use: its number among all that were, where it stood, its JSON and what became of it."""

    number: int
    place: str
    text: str
    group: Group

    def state(self) -> list[Any]:
        return [self.number, self.place, self.text]


@dataclass(kw_only=True)
class Standing:
    """Where a stream stands.

    Args:
        places: in the files. report: what became of the rows so far.
        batches: given so far. looked: how many at the last look.
        met: rows trained on so far. memory: a sample of them. held: rows held out for validation.
    """

    report: RowReport
    places: Places = ()
    batches: int = 0
    looked: int = 0
    met: int = 0
    memory: list[Kept] = field(default_factory=list)
    held: list[Kept] = field(default_factory=list)

    def copied(self) -> Standing:
        return replace(self, report=copy.deepcopy(self.report), memory=list(self.memory), held=list(self.held))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides about rows beside FollowConfig.

    Args:
        read: (where a row stands, its JSON) -> its group, and a digest of its prompt in 63 bits. Raises RowError,
            TemplateRefused or UserError for one that cannot be used.
        batch_size: rows of a batch over all ranks. seed: of draws from the memory.
        share: of the prompts that are held out. most: rows that are held out at most; None: all of that share.
        given: digests of prompts that are held out elsewhere; their rows are not trained on.
        stop: end the run at the first bad row.
    """

    read: Callable[[str, str], tuple[Group, int]]
    batch_size: int
    seed: int = 0
    share: float = 0.0
    most: int | None = None
    given: Collection[int] = ()
    stop: bool = False


class Stream:
    """The batches, one after the other.

    Args:
        source: where rows arrive, on rank 0; None on the others. name: of that, for people.
        config: how they are followed. rules: what becomes of them.

    Attributes:
        current: the rows of the batch given last, by number.
        stopped: whether this run was asked to leave; asked while it waits.
        told: is given each line about rows that are left out. noted: is given metrics of each batch.
        patient: False does not wait for rows at all.
    """

    def __init__(self, source: Feedback | None, name: str, config: FollowConfig, rules: Rules) -> None:
        self.source, self.name, self.config, self.rules = source, name, config, rules
        self.standing = Standing(report=RowReport(source=name, format="rows that arrive"))
        self.current: dict[int, Group] = {}
        self.stopped: Callable[[], bool] = lambda: False
        self.told: Callable[[str], None] = lambda line: log.warning("%s", line)
        self.noted: Callable[[Mapping[str, float]], None] = lambda values: None
        self.patient = True
        self.clock: Callable[[], float] = time.time
        self.sleep: Callable[[float], None] = time.sleep
        self._silence = Silence(config.quiet)
        self._before: Standing | None = None
        self._waiting = False

    def __getitem__(self, number: int) -> Group:
        """A row of the batch given last."""
        return self.current[number]

    def batch(self) -> list[int] | None:
        """The numbers of the next rows, new ones first; None when there will be no more. A collective."""
        before = self.standing.copied()
        rows = self._next()
        if rows is None:
            return None
        self._before = before
        self.current = {row.number: row.group for row in rows}
        standing = self.standing
        new = (standing.met - before.met) / len(rows)
        self.noted({"feedback/rows": standing.met, "feedback/new": new, "feedback/held_out": len(standing.held)})
        standing.batches += 1
        return [row.number for row in rows]

    def put_back(self) -> None:
        """The batch given last was not used."""
        assert self._before is not None, "no batch has been given"
        self.standing, self._before = self._before, None

    # ------------------------------------------------------------------ what comes next

    def _next(self) -> list[Kept] | None:
        config, standing = self.config, self.standing
        while True:
            old = min(round(config.replay * self.rules.batch_size), len(standing.memory))
            if new := self._fresh(self.rules.batch_size - old):
                self._waiting = False
                most = round(len(new) * config.replay / (1 - config.replay))
                drawn = self._old(min(old, most))
                self._remember(new)
                return new + drawn
            due = config.wait or not standing.memory or standing.batches - standing.looked >= config.every
            what = self._look() if due else "old"
            if what == "old":
                return self._old(self.rules.batch_size)
            if what == "end":
                return None
            if what == "wait":
                self.sleep(config.poll)

    def _fresh(self, count: int) -> list[Kept]:
        """The next `count` rows to train on, as far as the round has them; rows held out and bad rows are passed by."""
        found: list[Kept] = []
        while len(found) < count and under_way(self.standing.places):
            before = self.standing.places
            read = None if self.source is None else self.source.read(before, count - len(found))
            rows, self.standing.places = told_by_first(read)
            if not rows and self.standing.places == before:  # a disk that cannot be read now
                break
            found += self._sorted_out(rows)
        return found

    def _look(self) -> Next:
        """What to do without new rows. A collective."""
        found: tuple[Places, Next] | None = None
        if self.source is not None:
            found = self._decide(self.source)
        parts: Any = distributed.all_gather_objects((found, self.stopped()))
        (self.standing.places, what), _ = parts[0]
        self.standing.looked = self.standing.batches
        if what in ("wait", "old") and any(stop for _, stop in parts):
            return "end"
        return what  # type: ignore[no-any-return]

    def _decide(self, source: Feedback) -> tuple[Places, Next]:
        """On rank 0."""
        now, places, count = self.clock(), self.standing.places, 0
        if not under_way(places):  # else it could not be read just now
            places, count = source.look(places)
            self._silence.hear(places, now)
        over = self._silence.over(now) or not self.patient
        if count >= self.config.rows or (count and over):
            rank_zero_info(f"training on {described(source, places)}")
            return places, "round"
        what: Next = "end" if over else "wait"
        if what == "wait" and not self.config.wait and self.standing.memory:
            what = "old"
        if what == "wait" and not self._waiting:
            least = f"; {count} of at least {self.config.rows} are there" if self.config.rows > 1 else ""
            rank_zero_info(f"waiting for new rows in {self.name}{least}")
            self._waiting = True
        if what == "end" and self.patient:
            rank_zero_info(f"no new row in {self.name} for {self._silence.quiet:g} s: the run ends")
        return (places if under_way(self.standing.places) else withdrawn(places)), what

    def _old(self, count: int) -> list[Kept]:
        """Rows of the memory, drawn for this batch, none twice."""
        draw = generator(self.rules.seed, "replay", self.standing.batches)
        order = torch.randperm(len(self.standing.memory), generator=draw).tolist()
        return [self.standing.memory[i] for i in order[:count]]

    def _remember(self, new: Sequence[Kept]) -> None:
        """Each row trained on so far is in the memory with the same probability."""
        standing, config = self.standing, self.config
        for row in new:
            standing.met += 1
            if not config.replay and config.wait:  # never drawn from
                continue
            if len(standing.memory) < config.memory:
                standing.memory.append(row)
                continue
            draw = generator(self.rules.seed, "memory", standing.met)
            at = int(torch.randint(0, standing.met, (1,), generator=draw))
            if at < config.memory:
                standing.memory[at] = row

    # ------------------------------------------------------------------ rows

    def _sorted_out(self, rows: Sequence[Row]) -> list[Kept]:
        """Of these rows those to train on; the others are held out, or reported."""
        found: list[Kept] = []
        faults: list[str] = []
        report, held = self.standing.report, self.standing.held
        for place, text in rows:
            report.read += 1
            try:
                group, key = self.rules.read(place, text)
            except (RowError, TemplateRefused, UserError) as error:
                if self.rules.stop:
                    raise UserError(f"'{self.name}' {place}: {error}; mend it, or set on_bad_row: skip") from error
                report.drop(error.reason if isinstance(error, RowError) else str(error), place)
                faults.append(f"{place} {error}")
                continue
            out = key < self.rules.share * 2**63
            if key in self.rules.given or (out and len(held) == self.rules.most):
                report.drop(SURPLUS if out else LEAKED, place)
                continue
            kept = Kept(number=report.used, place=place, text=text, group=replace(group, index=report.used))
            split = "val" if out else "train"
            report.used += 1
            report.used_for[split] = report.used_for.get(split, 0) + 1
            (held if out else found).append(kept)
        if faults:
            self.told(left_out(faults, self.name))
        return found

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        standing = self.standing
        return {
            "places": as_state(standing.places),
            "batches": standing.batches,
            "looked": standing.looked,
            "met": standing.met,
            "memory": [row.state() for row in standing.memory],
            "held": [row.state() for row in standing.held],
            "report": standing.report.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Kept rows are read anew, under the settings of this run."""
        self.standing = Standing(
            report=RowReport.from_dict(state["report"]),
            places=from_state(state["places"]),
            batches=state["batches"],
            looked=state["looked"],
            met=state["met"],
            memory=self._again(state["memory"]),
            held=self._again(state["held"]),
        )
        self._before = None

    def _again(self, rows: Sequence[Sequence[Any]]) -> list[Kept]:
        found = []
        for number, place, text in rows:
            try:
                group, _ = self.rules.read(place, text)
            except (RowError, TemplateRefused, UserError) as error:
                self.told(f"{self.name} {place} was used and cannot be under the settings of this run: {error}")
            else:
                found.append(Kept(number=number, place=place, text=text, group=replace(group, index=number)))
        return found
