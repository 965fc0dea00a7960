"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from alignment.errors import UserError


@contextmanager
def appearing_file(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` to write to; then it is flushed to the disk and renamed to `path`, and the folder flushed.

    Where the block raises, nothing of it stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """The file, in place of an earlier one, whole or not at all. Raises UserError where it cannot be written."""
    try:
        with appearing_file(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"'{path}' cannot be written: {error.strerror}") from error


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
