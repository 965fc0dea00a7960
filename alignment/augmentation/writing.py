"""A file of rows that appears whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.whole_file import write_whole

ENDINGS = (".jsonl", ".parquet")


def check_target(out: Path, source: str, force: bool) -> None:
    """Raise UserError unless `out` can be written: a known ending, no other file in its place, not the source."""
    if out.suffix not in ENDINGS:
        raise UserError(f"'{out}' must end with {' or '.join(ENDINGS)}, which says how it is written")
    if out.is_dir():
        raise UserError(f"'{out}' is a folder; give a file that ends with {' or '.join(ENDINGS)}")
    if out.exists() and Path(source).expanduser().exists() and out.samefile(Path(source).expanduser()):
        raise UserError(f"'{out}' is the file that is read; write to another one")
    if out.exists() and not force:
        raise UserError(f"'{out}' exists; choose another name, or replace it with --force")


def write_rows(out: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows in the format that the ending of `out` names, and return the file's sha256.

    The content is written beside its place, flushed to the disk, and renamed. Raises UserError for a place that cannot
    be written, and for rows that the format cannot hold: in parquet every value of a column has one type, in JSON there
    are no dates.
    """
    content = _parquet(out, rows) if out.suffix == ".parquet" else _jsonl(out, rows)
    write_whole(out, content)
    return hashlib.sha256(content).hexdigest()


def _jsonl(out: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        return b"".join(map(_line, rows))
    except TypeError as error:
        raise UserError(f"the rows do not fit into '{out}': {error}; write a .parquet file instead") from error


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate in a column that nobody reads: only an escape can hold it
        return json.dumps(row).encode("ascii") + b"\n"


def _parquet(out: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.BytesIO()
    try:
        columns = {name: pyarrow.array([row.get(name) for row in rows]) for name in names}
        pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    except (pyarrow.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the rows do not fit into '{out}': {reason}; write a .jsonl file instead") from error
    return buffer.getvalue()
