"""Untrusted rows: what is wrong with a row, and the report that says how many were used and why the others were not.

Every row read ends in exactly one place: used, or dropped under one reason. `read == used + dropped` always holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

# Text longer than this is not tokenised at all: it is data gone wrong, and would stall set-up for minutes.
MAX_CHARACTERS = 1_000_000
_SPLITS = ("train", "val", "test", "predict")
_PLACES = 20  # places remembered per reason; the counts are exact


class RowError(Exception):
    """One row cannot be used. `reason` is a short phrase that rows may share, `detail` says more about this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


def text(value: object, name: str) -> str:
    """`value` as usable text. Raises RowError for None, another type, no text at all, NUL, invalid UTF-8, too long."""
    if value is None:
        raise RowError(f"{name} is None")
    if not isinstance(value, str):
        raise RowError(f"{name} has the wrong type", f"{type(value).__name__}, expected text")
    if not value.strip():
        raise RowError(f"{name} is empty")
    if len(value) > MAX_CHARACTERS:
        raise RowError(f"{name} is too long", f"{len(value):,} characters, at most {MAX_CHARACTERS:,}")
    if "\x00" in value:
        raise RowError(f"{name} holds a NUL character")
    # Readers keep undecodable bytes as lone surrogates, which is also what JSON's "\ud800" gives.
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise RowError(f"{name} is not valid UTF-8")
    return value


def number(value: object, name: str, *, minimum: float = -math.inf) -> float:
    """`value` as a finite number. Raises RowError for None, another type, NaN, infinity, below `minimum`."""
    if value is None:
        raise RowError(f"{name} is None")
    try:
        # bool is an int to Python, but never meant as a margin or a weight.
        result = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"{name} is not a number", repr(value)[:40]) from error
    if not math.isfinite(result):
        raise RowError(f"{name} is not a finite number", repr(value)[:40])
    if result < minimum:
        raise RowError(f"{name} is below {minimum:g}", f"{result:g}")
    return result


def yes_or_no(value: object, name: str) -> bool:
    """`value` as a truth value: true or false, 1 or 0, or one of these as text. Raises RowError for anything else."""
    if value is None:
        raise RowError(f"{name} is None")
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    found = known.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None
    if found is None:
        raise RowError(f"{name} is neither true nor false", repr(value)[:40])
    return found


@dataclass(kw_only=True)
class Tally:
    """How many rows something happened to, and where first."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if len(self.places) < _PLACES:
            self.places.append(place)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Token lengths of the rows used, beside their limit, and how many texts the limit cut."""

    mean: float
    p95: int
    longest: int
    limit: int | None
    cut: int

    @classmethod
    def of(cls, lengths: Sequence[int], limit: int | None, cut: int) -> Lengths:
        """Summary of `lengths` in tokens; all zero when there are none. p95 is the smallest length that 95 % reach."""
        if not len(lengths):
            return cls(mean=0.0, p95=0, longest=0, limit=limit, cut=cut)
        ordered = np.sort(np.asarray(lengths))
        rank = math.ceil(0.95 * len(ordered)) - 1
        return cls(mean=float(ordered.mean()), p95=int(ordered[rank]), longest=int(ordered[-1]), limit=limit, cut=cut)


@dataclass(kw_only=True)
class RowReport:
    """What became of the rows of one source.

    Args:
        source: where the rows came from. format: how they were understood.
        read: rows found. used: rows that became groups. dropped: the others, by reason.
        used_for: how many of those used went to which split. strata: how many for training are how difficult.
        remarks: what is worth knowing about rows that were used (such as a key that other rows lack).
        prompt, completion: token lengths of the rows used.
    """

    source: str
    format: str = ""
    read: int = 0
    used: int = 0
    used_for: dict[str, int] = field(default_factory=dict)
    strata: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, Tally] = field(default_factory=dict)
    remarks: dict[str, Tally] = field(default_factory=dict)
    prompt: Lengths | None = None
    completion: Lengths | None = None

    @property
    def skipped(self) -> int:
        """Rows dropped for any reason."""
        return sum(tally.count for tally in self.dropped.values())

    def drop(self, reason: str, place: str) -> None:
        self.dropped.setdefault(reason, Tally()).add(place)

    def remark(self, what: str, place: str) -> None:
        self.remarks.setdefault(what, Tally()).add(place)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for the cache and for trackers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RowReport:
        """The inverse of `to_dict`."""
        values = dict(values)
        for name in ("dropped", "remarks"):
            values[name] = {reason: Tally(**tally) for reason, tally in values[name].items()}
        for name in ("prompt", "completion"):
            values[name] = Lengths(**values[name]) if values[name] else None
        return cls(**values)

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) pairs for people."""
        # Splits are read in another order by each of Lightning's commands.
        used_for = {name: self.used_for[name] for name in _SPLITS if name in self.used_for}
        split, strata = (
            ", ".join(f"{count:,} {name}" for name, count in counts.items()) for counts in (used_for, self.strata)
        )
        used = f"{self.used:,}" + (f" ({split})" if split else "")
        out = [("format", self.format), ("rows read", f"{self.read:,}"), ("rows used", used)]
        out += [("difficulty", strata)] if strata else []
        out += [(f"dropped: {reason}", _places(tally)) for reason, tally in self.dropped.items()]
        out += [(f"note: {what}", _places(tally)) for what, tally in self.remarks.items()]
        for name, stats in (("prompt", self.prompt), ("completion", self.completion)):
            if stats is not None:
                limit = "no limit" if stats.limit is None else f"limit {stats.limit}, {stats.cut:,} cut"
                tokens = f"mean {stats.mean:.0f}, p95 {stats.p95}, longest {stats.longest} ({limit})"
                out.append((f"{name} tokens", tokens))
        return out

    def table(self) -> Table:
        """The same for a terminal."""
        table = Table(title=f"Data: {self.source}", show_header=False, title_justify="left")
        for what, value in self.lines():
            table.add_row(what, value)
        return table


def _places(tally: Tally) -> str:
    if not tally.places:
        return f"{tally.count:,}"
    shown = ", ".join(tally.places[:5])
    return f"{tally.count:,} ({shown}{', ...' if tally.count > 5 else ''})"
