"""Verdicts of a judge, kept in an sqlite file, so that what was judged once is not asked again."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from alignment.errors import UserError

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""For another process that writes."""
AT_ONCE = 500
"""Keys in one query; sqlite takes at least 999."""


class VerdictCache:
    """Key -> verdict, shared by the processes of this machine. A file that cannot be used later on (full, locked,
    damaged) costs a warning and further requests, never a verdict.

    Raises UserError for a file that cannot be made or read at the start.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._told = False
        try:
            with closing(self._open()) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value REAL NOT NULL)")
        except sqlite3.Error as error:
            raise UserError(f"cache '{path}' cannot be used: {error}; its folder must exist and be writable") from error

    def get(self, keys: Sequence[str]) -> dict[str, float]:
        """Those that are known."""
        found: dict[str, float] = {}
        try:
            with closing(self._open()) as connection:
                for start in range(0, len(keys), AT_ONCE):
                    part = keys[start : start + AT_ONCE]
                    marks = ",".join("?" * len(part))
                    found.update(connection.execute(f"SELECT key, value FROM verdicts WHERE key IN ({marks})", part))
        except sqlite3.Error as error:
            self._tell(error)
        return found

    def put(self, verdicts: Mapping[str, float]) -> None:
        """Keep these; a key that is there already keeps its verdict."""
        if not verdicts:
            return
        try:
            with closing(self._open()) as connection, connection:
                connection.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", list(verdicts.items()))
        except sqlite3.Error as error:
            self._tell(error)

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=WAIT_S)

    def _tell(self, error: sqlite3.Error) -> None:
        if not self._told:
            self._told = True
            log.warning("the judge's cache %s is not used: %s", self._path, error)
