"""Feedback in a table of an sqlite file, opened read-only, for the moment of a query: a writer in WAL mode never waits
for us, nor we for it.

The table has an INTEGER PRIMARY KEY that rises with each row, which makes the key of the last row taken a position. A
column `row` holds each row as one JSON object; without it the columns are the row's, those that are NULL left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from alignment.errors import UserError
from alignment.feedback import Place, Places, Row, Trouble

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds to wait for a writer that locks the whole file."""
ROW = "row"
"""The column that holds a row as JSON."""


class _Table(NamedTuple):
    """A table: its name, that name and its key as SQL has them, and the names of its columns."""

    name: str
    quoted: str
    key: str
    columns: list[str]


class FeedbackTable:
    """Rows of a table, each once; see alignment.feedback.Feedback.

    Args:
        path: the sqlite file. table: its table; None: its only one.
    """

    def __init__(self, path: Path, table: str | None = None) -> None:
        self.path, self.table = path, table
        self._trouble = Trouble()

    def check(self) -> None:
        """Raise UserError for a file that is none of sqlite, or has no table that can be followed; one that is not
        there yet, or is locked now, may have one later."""
        if not self.path.exists():
            return
        try:
            with suppress(sqlite3.OperationalError), closing(self._connect()) as database:
                self._table(database)
        except sqlite3.DatabaseError as error:
            raise UserError(f"'{self.path}' is not an sqlite file that can be read: {error}") from error

    def where(self, place: Place) -> str:
        return str(self.path)

    def look(self, places: Places) -> tuple[Places, int]:
        place, count = places[0] if places else Place(name=self.table or ""), 0
        place = place.withdrawn()
        with self._trouble.told():
            place, count = self._look(place)
        return (place,), count

    def read(self, places: Places, count: int) -> tuple[list[Row], Places]:
        (place,) = places
        rows: list[Row] = []
        if place.open:
            with self._trouble.told():
                rows, place = self._read(place, count)
        return rows, (place,)

    # ------------------------------------------------------------------ queries

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
        # Undecodable bytes become lone surrogates, which whoever reads the row finds.
        database.text_factory = lambda raw: raw.decode("utf-8", errors="surrogateescape")
        return database

    def _table(self, database: sqlite3.Connection) -> _Table | None:
        """The table; None while it is not there. Raises UserError for one without a key that says what is new, or where
        it is not clear which one is meant."""
        found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        names = sorted(name for (name,) in found)
        if self.table is None and len(names) > 1:
            raise UserError(f"'{self.path}' has the tables {', '.join(names)}; say which one with table")
        if self.table is not None and names and self.table not in names:
            raise UserError(f"'{self.path}' has no table '{self.table}'; it has {', '.join(names)}")
        if not names:
            return None
        name = self.table or names[0]
        columns = database.execute(f"PRAGMA table_info({_quoted(name)})").fetchall()
        keys = [column for _, column, kind, _, _, key in columns if key and str(kind).upper() == "INTEGER"]
        if len(keys) != 1 or sum(key > 0 for *_, key in columns) != 1:
            raise UserError(
                f"table '{name}' of '{self.path}' has no column INTEGER PRIMARY KEY to say which rows are new; give it "
                "one, best with AUTOINCREMENT"
            )
        return _Table(name, _quoted(name), _quoted(keys[0]), [column for _, column, *_ in columns])

    def _look(self, place: Place) -> tuple[Place, int]:
        if not self.path.exists():
            return place, 0
        with closing(self._connect()) as database:
            table = self._table(database)
            if table is None:
                return place, 0
            inode = self.path.stat().st_ino
            (top,) = database.execute(f"SELECT max({table.key}) FROM {table.quoted}").fetchone()
            if top is None:
                return replace(place, inode=inode), 0
            place = self._same(place, _given(database, table, int(top)), inode, _at(database, table, place))
            after = f"SELECT count(*) FROM {table.quoted} WHERE {table.key} > ? AND {table.key} <= ?"
            (count,) = database.execute(after, (place.position, top)).fetchone()
        return replace(place, end=max(int(top), place.position), last=max(int(top), place.row)), int(count)

    def _same(self, place: Place, given: int, inode: int, held: str | None) -> Place:
        """The place, at the start where the table is another one than that which was read.

        Args:
            given: the highest key so far. held: mark of the row at the place, None without one.
        """
        moved = place.inode != inode and held is not None
        if place.position and (given < place.position or (moved and held != place.mark)):
            log.warning(
                "%s was emptied or replaced after row %d had been read: it is read from its start",
                self.path,
                place.row,
            )
            return Place(name=place.name, inode=inode)
        if place.position and held is not None and held != place.mark:
            log.warning(
                "%s: row %d is not what was read there; rows up to it that were changed are not read again",
                self.path,
                place.row,
            )
            return replace(place, inode=inode, mark=held)
        return replace(place, inode=inode)

    def _read(self, place: Place, count: int) -> tuple[list[Row], Place]:
        if not self.path.exists():  # the next look says what happened
            return [], place.withdrawn()
        with closing(self._connect()) as database:
            table = self._table(database)
            if table is None:
                return [], place.withdrawn()
            moved = place.position and place.inode != self.path.stat().st_ino
            if moved and _at(database, table, place) not in (None, place.mark):
                return [], place.withdrawn()
            rows_after = f"FROM {table.quoted} WHERE {table.key} > ? AND {table.key} <= ?"
            query = f"SELECT {table.key}, * {rows_after} ORDER BY {table.key} LIMIT ?"
            found = database.execute(query, (place.position, place.end, count)).fetchall()
        rows = [(f"row {number}", _as_json(table.columns, values)) for number, *values in found]
        # Fewer rows than asked for are all of the round: keys may have gaps.
        at = place.end if len(rows) < count else int(found[-1][0])
        mark = _mark(table.columns, found[-1][1:]) if found else place.mark
        return rows, replace(place, position=at, row=at, mark=mark)


def _given(database: sqlite3.Connection, table: _Table, top: int) -> int:
    """The highest key so far: with AUTOINCREMENT of rows that are deleted, too."""
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_sequence'").fetchone() is None:
        return top
    found = database.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table.name,)).fetchone()
    return top if found is None else max(top, int(found[0]))


def _at(database: sqlite3.Connection, table: _Table, place: Place) -> str | None:
    """Mark of the row at a place, to be compared with the place's own; None without such a row."""
    query = f"SELECT * FROM {table.quoted} WHERE {table.key} = ?"
    found = database.execute(query, (place.position,)).fetchone()
    return None if found is None else _mark(table.columns, found, place.mark)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _named(columns: list[str], values: Any) -> dict[str, Any]:
    """column -> value, of those that are not NULL."""
    return {
        name: value.decode("utf-8", errors="surrogateescape") if isinstance(value, bytes) else value
        for name, value in zip(columns, values, strict=True)
        if value is not None
    }


def _as_json(columns: list[str], values: Any) -> str:
    """The row as JSON: its column `row`, else its columns."""
    named = _named(columns, values)
    return str(named.get(ROW, "null")) if ROW in columns else json.dumps(named)


def _mark(columns: list[str], values: Any, earlier: str | None = None) -> str:
    """Digest of a row; behind it, where columns are the row, the names of those that were not NULL.

    Args:
        earlier: a mark to compare with: the digest is of its columns, since a table may get more of them.
    """
    if ROW in columns:
        return _digest(_as_json(columns, values))
    named = _named(columns, values)
    known = json.dumps(list(named)) if earlier is None else earlier.partition(" ")[2]
    if not known:  # a mark of an earlier version: of all columns
        return _digest(json.dumps(named))
    return f"{_digest(json.dumps({name: named.get(name) for name in json.loads(known)}))} {known}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", errors="surrogateescape"), digest_size=8).hexdigest()
