"""Rows of feedback that others write while a run trains, each taken once: a file of JSON lines, a folder of them, or a
table of an sqlite file. docs/feedback.md says what writers have to keep to.

Reading goes in rounds. `look` says where a round of all that has arrived by now would end; `read` takes its rows. Where
reading stands is a tuple of places, one for each file, made for the checkpoint: a run that was killed goes on behind
the last row of its checkpoint, whatever it had read beyond. Only rank 0 needs to reach the files: others are told.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from alignment import distributed
from alignment.errors import UserError

log = logging.getLogger(__name__)

SQLITE = (".db", ".sqlite", ".sqlite3")
"""Endings of sqlite files that need not be there yet."""
LINES = ".jsonl"
"""Ending of the files of a folder that are read."""
SHOWN = 3
"""Damaged rows that are named in one line."""

_OTHERS = (".csv", ".tsv", ".parquet", ".gz", ".zip", ".zst")
_SQLITE_START = b"SQLite format 3\x00"

Row = tuple[str, str]
"""(where a row stands, its JSON)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where reading stands in one file.

    Args:
        name: of the file in its folder, or of the table.
        position: bytes read, or the key of the last row read.
        row: lines read, or that key.
        end, last: where the rows of this round end, in the same measures. No round is under way when that is reached.
        inode: of the file, by which one that was renamed is known again.
        mark: digest of what was read last, by which one that was replaced is told apart.
    """

    name: str
    position: int = 0
    row: int = 0
    end: int = 0
    last: int = 0
    inode: int = 0
    mark: str = ""

    @property
    def open(self) -> bool:
        """Whether rows of this round are left."""
        return self.position < self.end

    def withdrawn(self) -> Place:
        """The same without the rest of the round."""
        return replace(self, end=self.position, last=self.row)


Places = tuple[Place, ...]


class Feedback(Protocol):
    """Where rows arrive. Trouble with a disk or a database is told in the log, once, and tried again at the next call.

    Attributes:
        path: as it was given.
    """

    path: Path

    def check(self) -> None:
        """Raise UserError for what can never be read."""

    def look(self, places: Places) -> tuple[Places, int]:
        """(the places with a round of all that has arrived, how many rows it has, blank lines among them). A file that
        was renamed, replaced or cut is told in one line."""
        ...

    def read(self, places: Places, count: int) -> tuple[list[Row], Places]:
        """(at most `count` rows of the round, the places behind them)."""
        ...

    def where(self, place: Place) -> str:
        """The file of a place, for people."""
        ...


def under_way(places: Iterable[Place]) -> bool:
    """Whether rows of the round are left."""
    return any(place.open for place in places)


def withdrawn(places: Places) -> Places:
    """The places without what is left of the round."""
    return tuple(place.withdrawn() for place in places)


def described(source: Feedback, places: Iterable[Place], most: int = 3) -> str:
    """The rows of a round, for people: `rows 3 to 7 of FILE`."""
    parts = []
    for place in places:
        if place.open:
            first = place.row + 1
            rows = f"row {first}" if place.last == first else f"rows {first} to {place.last}"
            parts.append(f"{rows} of {source.where(place)}")
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more files" if len(parts) > most else "")


def left_out(faults: Sequence[str], name: str) -> str:
    """One line about rows that cannot be used: how many, of what, and what is wrong with the first ones."""
    shown = "; ".join(faults[:SHOWN]) + ("; ..." if len(faults) > SHOWN else "")
    count = f"1 row of {name} is" if len(faults) == 1 else f"{len(faults)} rows of {name} are"
    return f"{count} left out: {shown}"


def as_state(places: Places) -> list[dict[str, Any]]:
    """For a checkpoint."""
    return [asdict(place) for place in places]


def from_state(state: Sequence[Mapping[str, Any]]) -> Places:
    """Inverse of `as_state`."""
    return tuple(Place(**values) for values in state)


# ---------------------------------------------------------------------- what is at a path


def open_feedback(path: str, table: str | None, here: str) -> Feedback:
    """What is at a path: an sqlite file by its content or ending, a folder, else a file of JSON lines. Files need not
    be there yet, folders do.

    Args:
        table: of an sqlite file; None: its only one.
        here: what the setting belongs to, for errors.

    Raises:
        UserError: it is none of these.
    """
    from alignment.feedback_files import FeedbackFiles
    from alignment.feedback_table import FeedbackTable

    if not path.strip():  # as a path it would be the working folder
        raise UserError(f"{here}: the path is empty; give a folder of .jsonl files, one such file, or an sqlite file")
    place = Path(path).expanduser()
    if place.suffix.lower() in _OTHERS:
        raise UserError(f"{here}: '{path}' cannot be followed; rows arrive in .jsonl files or in an sqlite table")
    folder = place if not place.suffix and not place.exists() else place.parent
    if not folder.is_dir():
        raise UserError(f"{here}: there is no folder '{folder}'; make it first, or name a .jsonl or an sqlite file")
    if place.suffix.lower() in SQLITE or is_sqlite(place):
        return FeedbackTable(place, table)
    if table is not None:
        raise UserError(f"{here}: a table is of an sqlite file, and '{path}' is none; leave table out")
    return FeedbackFiles(place)


def is_sqlite(path: Path) -> bool:
    """Whether this is an sqlite file by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE_START)) == _SQLITE_START
    except OSError:
        return False


def opened(path: str, table: str | None, here: str) -> Feedback | None:
    """What `open_feedback` gives, checked, on rank 0, which alone reads; None on the other ranks. A collective: what is
    wrong is raised on every rank."""
    source: Feedback | None = None
    wrong: str | None = None
    if distributed.rank() == 0:
        try:
            source = open_feedback(path, table, here)
            source.check()
        except UserError as error:
            wrong = str(error)
    wrong = told_by_first(wrong)
    if wrong is not None:
        raise UserError(wrong)
    return source


def told_by_first(value: Any) -> Any:
    """The picklable value of rank 0. A collective."""
    return distributed.all_gather_objects(value)[0]


class Trouble:
    """What cannot be read now, each line said once until a call goes through without it."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._now: set[str] = set()

    def tell(self, line: str) -> None:
        if line not in self._said | self._now:
            log.warning("%s", line)
        self._now.add(line)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around one call: an error of the disk, or of a database or its tables, ends it and is told."""
        self._now = set()
        try:
            yield
        except (OSError, sqlite3.Error, UserError) as error:
            self.tell(f"feedback cannot be read: {error}")
        self._said = self._now


# ---------------------------------------------------------------------- rounds at a clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where reading in rounds stands.

    Args:
        places: see Place. due: when the next round may begin, in seconds of the clock. None: at once.
    """

    places: Places = ()
    due: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"places": as_state(self.places), "due": self.due}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Standing:
        """Inverse of `state_dict`. Raises UserError for the state of a version that knew one file only."""
        if "places" not in state:
            raise UserError(
                "the checkpoint says where reading of feedback stands in a form of an earlier version; `alignment "
                "export` its weights, take the rows it has read out of the file, and start a new run"
            )
        return cls(places=from_state(state["places"]), due=state["due"])


class Rounds:
    """Begins a round every so many seconds, if enough rows have arrived.

    Args:
        source: where they arrive. every: seconds from one round to the next. rows: that a round begins with.
        quiet: seconds without a new row after which fewer are enough, and the rows are at an end. None: never.
    """

    def __init__(self, source: Feedback, every: float, rows: int = 1, quiet: float | None = None) -> None:
        self.source, self.every, self.rows = source, every, rows
        self.silence = Silence(quiet)

    def begin(self, standing: Standing, now: float) -> Standing:
        """With a round under way, if one is, or if it is time for one and enough rows have arrived. When none has come
        for so long, it looks a last time."""
        due = standing.due
        early = due is not None and now < due <= now + self.every  # a later one: the clock was put back
        if under_way(standing.places) or (early and not self.silence.over(now)):
            return standing
        places, count = self.source.look(standing.places)
        self.silence.hear(places, now)
        if count < self.rows and not self.silence.over(now):
            places = withdrawn(places)
        return Standing(places=places, due=now + self.every)


class Silence:
    """How long no row has arrived, as seen at the looks of this process.

    Args:
        quiet: seconds after which it is over. None: never.
    """

    def __init__(self, quiet: float | None) -> None:
        self.quiet = math.inf if quiet is None else quiet
        self._since: float | None = None
        self._ends: dict[str, int] = {}

    def hear(self, places: Places, now: float) -> None:
        """What a look saw, with its round still in it."""
        ends = {place.name: place.end for place in places}
        if self._since is None or ends != self._ends:
            self._since, self._ends = now, ends

    def over(self, now: float) -> bool:
        return self._since is not None and now - self._since >= self.quiet
