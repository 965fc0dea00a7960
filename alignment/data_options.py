"""What the command lines of `alignment data` share: mistakes in one line, lists of names, places to write to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from alignment.cli_errors import CommandLineError
from alignment.errors import UserError


class Parser(argparse.ArgumentParser):
    """A mistake is one line: the usage of so many options would hide it."""

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(message)


class Names(argparse.Action):
    """Names separated by commas, as a tuple; a flag that is given again adds to them. For parsers that parse once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._found: tuple[str, ...] = ()

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        names = tuple(name.strip() for name in str(values).split(","))
        self._found += tuple(name for name in names if name and name not in self._found)
        setattr(namespace, self.dest, self._found)


def check_writable(folder: Path, flag: str) -> None:
    """Make a folder, and raise UserError unless files can be written to it: before the work, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{flag}: '{folder}' cannot be written to ({error.strerror}); name another place") from error
