"""For services that collect feedback: append one row so that it is there whole or not at all, whatever happens next.

    from alignment.feedback_writer import append_row

    append_row("feedback.jsonl", {"prompt": "...", "chosen": "...", "rejected": "..."})

It needs nothing but the standard library, and any number of processes and threads may call it at once. Rows may as well
be written by other means: docs/feedback.md has the two formats.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.whole_file import sync

SQLITE = (".db", ".sqlite", ".sqlite3")
TABLE = "feedback"
PATIENCE = 30.0
"""Seconds to wait for another writer of an sqlite file."""


def append_row(path: str | os.PathLike[str], row: Mapping[str, Any], *, table: str = TABLE) -> None:
    """Append a row. When this returns the row is on the disk; when it raises it is not, or a killed process leaves at
    most the beginning of a line, which no reader takes and which the next call closes off.

    Args:
        path: a file of JSON lines, made if it is not there; a folder, in which each machine writes a file of its own;
            or an sqlite file (.db, .sqlite, .sqlite3), made in WAL mode with the table if it is not there.
        row: what JSON can hold. table: of an sqlite file; its column `row` takes the JSON.

    Raises:
        UserError: JSON cannot hold the row, or the path is empty. OSError, sqlite3.Error: it could not be written.
    """
    try:
        text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
        data = text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"a row of feedback must be what JSON can hold: {error}") from error
    if not os.fspath(path):  # as a path it would be the working folder
        raise UserError("the path of feedback is empty; name a .jsonl file, a folder or an sqlite file")
    target = Path(path)
    if target.suffix.lower() in SQLITE:
        _insert(target, text, table)
    else:
        _append(target / f"{socket.gethostname()}.jsonl" if target.is_dir() else target, data + b"\n")


def _append(path: Path, line: bytes) -> None:
    new = not path.exists()
    # Readable too: the last byte says whether a writer was killed inside a line.
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file gives it back
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            _write(file, line)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)  # no half a line on a full disk
            raise
    finally:
        os.close(file)
    if new:
        sync(path.parent)  # the name of a new file is on the disk too


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _insert(path: Path, text: str, table: str) -> None:
    name = '"' + table.replace('"', '""') + '"'
    with closing(sqlite3.connect(path, timeout=PATIENCE)) as database:
        if database.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            database.execute("PRAGMA journal_mode = WAL")  # readers and writers do not wait for each other
        database.execute("PRAGMA synchronous = FULL")  # a row is on the disk when its transaction is done
        with database:
            database.execute(
                f'CREATE TABLE IF NOT EXISTS {name} (id INTEGER PRIMARY KEY AUTOINCREMENT, "row" TEXT NOT NULL)'
            )
            database.execute(f'INSERT INTO {name} ("row") VALUES (?)', (text,))
