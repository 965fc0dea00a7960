"""What has been graded so far, on disk: a grading that was stopped goes on where it stood.

A first line for what is being graded and how, then one for each part of the prompts, appended and flushed to the disk.
A line that a crash cut off is dropped. Answers depend on a prompt's own keys alone, so a resumed grading gives the
numbers of one that was never stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from alignment.errors import UserError
from alignment.whole_file import sync


class Graded(NamedTuple):
    """One prompt: the sum of its answers' success, and how many of them had a value."""

    success: float
    trials: int


class Journal:
    """The grades of one grading.

    Args:
        path: the file; made with the first grades.
        identity: everything that the grades depend on, as JSON values.

    Attributes:
        identity: as given. grades: of the prompts graded so far, by number. faults: answers that lost their value to a
            fault.

    Raises UserError where a journal of other data or settings is there, or a file that is none.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.grades: dict[int, Graded] = {}
        self.faults = 0
        if path.exists():
            self._read()

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        if not whole:
            self.path.unlink()
            return
        try:
            first, *parts = map(json.loads, whole.decode("utf-8").splitlines())
            self._check(first)
            for part in parts:
                self.grades |= {int(number): Graded(float(s), int(t)) for number, s, t in part["grades"]}
                self.faults += int(part["faults"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"'{self.path}' is no journal of a grading ({error}); delete it to begin anew") from error

    def _check(self, identity: Mapping[str, Any]) -> None:
        if differs := sorted(key for key, value in self.identity.items() if identity.get(key) != value):
            raise UserError(
                f"'{self.path}' is of a grading with another {', '.join(differs)}; give the same again to go on, or "
                "delete it to begin anew"
            )

    def add(self, grades: Mapping[int, Graded], faults: int) -> None:
        """Note the grades of some prompts, by their numbers, and how many of their answers were lost to faults.

        Raises UserError where the disk does not take them.
        """
        part = {"grades": [[number, *graded] for number, graded in grades.items()], "faults": faults}
        lines = [json.dumps(part)]
        if new := not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines.insert(0, json.dumps(self.identity))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync(self.path.parent)
        except OSError as error:
            raise UserError(
                f"'{self.path}' cannot be written: {error.strerror}; mend that and give the same command again, which "
                "goes on where it stood"
            ) from error
        self.grades |= grades
        self.faults += faults

    def close(self) -> None:
        """Delete the file: the grades are where they belong."""
        self.path.unlink(missing_ok=True)
