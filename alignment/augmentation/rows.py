"""The rows of a file: what each holds, what it means to the readers of `datamodules`, and where it stands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from alignment import world
from alignment.chat import Message
from alignment.errors import UserError
from datamodules.formats import LABEL, Format, Purpose, Row, common_keys, detect
from datamodules.prepare import OnBadRow, prompt_key
from datamodules.reading import Record, open_source
from datamodules.rows import RowError, RowReport

AUGMENTED, ATTACK, EXPANSION, SOURCE_ROW = "augmented", "attack", "expansion", "source_row"
NONE = "none"
"""`attack` and `expansion` of a row that has none."""
_LOOKED_AT = 100  # rows that decide the format, as for training
_WORLD: Mapping[Purpose, world.Kind] = {"supervised": "sft", "prompts": "prompts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One usable row.

    Args:
        number: where it stands in the file, from 1; rows that cannot be used count.
        values: the row as it was read. row: what it means.
    """

    number: int
    values: Mapping[str, Any]
    row: Row

    @property
    def asked(self) -> str:
        """The last turn of the user, or all of a prompt that is one text; "" where there is no prompt."""
        return asked(self.row)

    @property
    def original(self) -> bool:
        """Whether it is no row that an earlier augmentation has made."""
        return not self.values.get(AUGMENTED)

    @property
    def prompt_key(self) -> int:
        """Digest of the prompt, blind to case and white space."""
        return prompt_key(self.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The usable rows of one source.

    Args:
        path: of the source. sha256: of the file itself, so that `sha256sum` gives the same; of a folder, a hub data set
            or generated rows the digest of their content.
        purpose, format: how the rows are understood. keys: columns that most rows have.
        entries: usable rows in order. report: rows read, used, and dropped by reason.
    """

    path: str
    sha256: str
    purpose: Purpose
    format: Format
    keys: frozenset[str]
    entries: Sequence[Entry]
    report: RowReport = field(repr=False)

    @property
    def known(self) -> frozenset[str]:
        """The columns that parsing knows."""
        return self.keys | frozenset(self.format.columns)

    def check_new_columns(self, names: Sequence[str]) -> None:
        """Raise UserError where the file has one of these columns, and not from an earlier augmentation."""
        taken = [name for name in names if name in self.keys]
        if taken and AUGMENTED not in self.keys:
            raise UserError(f"'{self.path}' has a column '{taken[0]}' of its own, which this would write; rename it")


def read_rows(
    path: str,
    *,
    purpose: str | None = None,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    config: str | None = None,
    max_rows: int | None = None,
    on_bad_row: OnBadRow = "skip",
    prompts_first: bool = False,
) -> Rows:
    """Read and understand the rows of a file, a folder, a hub data set or generated rows.

    Args:
        path, columns, split, config, max_rows, on_bad_row: as for `datamodules.GroupData`.
        purpose: what the rows are for. None: pairs, labelled completions, completions or prompts, whichever their
            columns fit first.
        prompts_first: with purpose None, take them as prompts where that is possible.

    Raises UserError for a source without usable rows, and under on_bad_row "stop" for the first bad one.
    """
    purposes = _purposes(purpose, prompts_first)
    if max_rows is not None and max_rows < 1:
        raise UserError(f"--max_rows is {max_rows}; it must be at least 1")
    kind: world.Kind = _WORLD.get(purposes[0], "preference")
    source = open_source(path, split=split, config=config, kind=kind, size=max_rows)
    records = list(islice(source.records(), max_rows))
    if not records:
        raise UserError(f"'{source.name}' holds no rows")
    keys = common_keys([record.values for record in records[:_LOOKED_AT]])
    if not keys:
        why = records[0].error or f"it is {type(records[0].values).__name__}, not an object"
        raise UserError(f"'{source.name}' has no row that can be read: {records[0].place}: {why}")
    chosen, fmt = _understood(keys, purposes, columns or {}, source.name)
    report = RowReport(source=source.name, format=str(fmt))
    entries = list(_entries(records, chosen, fmt, keys | frozenset(fmt.columns), report, on_bad_row))
    report.used = len(entries)
    if not entries:
        reasons = "; ".join(f"{what} {value}" for what, value in report.lines() if what.startswith("dropped"))
        raise UserError(f"none of the {report.read} rows of '{source.name}' can be used: {reasons}")
    return Rows(
        path=path,
        sha256=_sha256(Path(path).expanduser()) or source.digest,
        purpose=chosen,
        format=fmt,
        keys=keys,
        entries=entries,
        report=report,
    )


def asked(row: Row) -> str:
    """The last turn of the user, or all of a prompt that is one text."""
    if isinstance(row.prompt, str):
        return row.prompt
    return next((message.content for message in reversed(row.prompt) if message.role == "user"), "")


def asking(row: Row, text: str) -> tuple[Message, ...] | str:
    """The prompt of `row` with `text` in place of what `asked` gives."""
    if isinstance(row.prompt, str):
        return text
    place = max(i for i, message in enumerate(row.prompt) if message.role == "user")
    return (*row.prompt[:place], Message("user", text), *row.prompt[place + 1 :])


def origin(entry: Entry) -> int:
    """Number of the row that a row comes from, in the first file of a chain of augmentations."""
    value = entry.values.get(SOURCE_ROW)
    return value if isinstance(value, int) and not isinstance(value, bool) else entry.number


def _purposes(purpose: str | None, prompts_first: bool) -> tuple[Purpose, ...]:
    known: tuple[Purpose, ...] = get_args(Purpose)
    if purpose is None:
        tried: tuple[Purpose, ...] = ("preference", "unpaired", "supervised", "prompts")
        return ("prompts", *tried[:-1]) if prompts_first else tried
    for name in known:
        if name == purpose:
            return (name,)
    raise UserError(f"--purpose is '{purpose}'; use {', '.join(known)}")


def _understood(
    keys: frozenset[str], purposes: Sequence[Purpose], columns: Mapping[str, str], name: str
) -> tuple[Purpose, Format]:
    """The first purpose that the columns fit. Raises the complaint of the last where none does."""
    complaint: UserError | None = None
    for purpose in purposes:
        if purpose == "unpaired" and len(purposes) > 1 and LABEL not in keys | frozenset(columns):
            continue  # pairs would do for it too, but nothing says that they are meant as labels
        try:
            return purpose, detect(keys, purpose, columns, name)
        except UserError as error:
            complaint = error
    assert complaint is not None, "at least one purpose is tried"
    raise complaint


def _entries(
    records: Sequence[Record],
    purpose: Purpose,
    fmt: Format,
    known: frozenset[str],
    report: RowReport,
    on_bad_row: OnBadRow,
) -> Iterator[Entry]:
    for number, record in enumerate(records, start=1):
        report.read += 1
        try:
            if record.error is not None:
                raise record.error
            yield Entry(number=number, values=record.values, row=fmt.parse(record.values, purpose, known))
        except RowError as error:
            if on_bad_row == "stop":
                raise UserError(
                    f"'{report.source}' {record.place}: {error}; mend it, or leave --on_bad_row stop out"
                ) from error
            report.drop(error.reason, record.place)


def _sha256(file: Path) -> str | None:
    if not file.is_file():
        return None
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
