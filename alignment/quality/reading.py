"""Rows as the checks see them, read by the readers of the data modules: what a run would use, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from alignment.chat import Message
from alignment.errors import UserError
from alignment.quality.settings import Settings
from datamodules.formats import Format, Purpose, Row, common_keys, detect
from datamodules.prepare import prompt_key
from datamodules.reading import SUFFIXES, Record, Source, open_source
from datamodules.rows import RowError, RowReport

_LOOKED_AT = 100
"""Rows that decide the format, as for a run."""
_TRIED: tuple[Purpose, ...] = ("preference", "unpaired", "supervised", "prompts")
_WORLD: Mapping[str, Any] = {"supervised": "sft", "prompts": "prompts"}
_TRAIN = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row that a run could use.

    Args:
        place: where it stands, for people. split: the part of the data it is in. kind: what it is for.
        key: of its prompt, equal for prompts that differ in case or white space alone.
        messages: the prompt as its format gives it, for a tokenizer. prompt: its text without a system message.
        completions: chosen and rejected; or one; or none.
        labels: whether each completion is good, of labelled rows.
        raw: whether no chat template applies.
        columns: the values of the columns that checks look up, where the row has them.
    """

    place: str
    split: str
    kind: Purpose
    key: int
    messages: tuple[Message, ...] | str
    prompt: str
    completions: tuple[str, ...]
    labels: tuple[bool, ...] | None = None
    raw: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> str:
        """The prompt, or of plain text the text."""
        return self.prompt or " ".join(self.completions)

    @property
    def pair(self) -> tuple[str, str] | None:
        """(chosen, rejected) of a preference row."""
        return (self.completions[0], self.completions[1]) if self.kind == "preference" else None

    @property
    def learned(self) -> tuple[str, ...]:
        """The completions that a policy is to imitate."""
        if self.labels is not None:
            return tuple(c for c, good in zip(self.completions, self.labels, strict=True) if good)
        return self.completions[:1]

    @property
    def negatives(self) -> tuple[str, ...]:
        """The completions that a policy is to avoid."""
        if self.labels is not None:
            return tuple(c for c, good in zip(self.completions, self.labels, strict=True) if not good)
        return self.completions[1:]


@dataclass(frozen=True, kw_only=True)
class SourceRead:
    """One source: what a tracker wants to know of it (`tracking.DatasetInfo`), and what became of its rows."""

    name: str
    path: str
    split: str
    rows: int
    digest: str
    report: RowReport


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All rows that were read, in their order. `annotator_column` says who judged a row, where it is there."""

    examples: Sequence[Example]
    sources: Sequence[SourceRead]
    annotator_column: str = "annotator"

    @property
    def splits(self) -> list[str]:
        """Names of the splits, those for training first, then in the order in which they appear."""
        found = list(dict.fromkeys(example.split for example in self.examples))
        return sorted(found, key=lambda name: not name.lower().startswith(_TRAIN))

    @cached_property
    def repeats(self) -> Sequence[Example | None]:
        """For each row the first earlier one of its split that it repeats but for case and white space, or None. Two
        annotators of one pair repeat nothing."""
        seen: dict[tuple[object, ...], Example] = {}
        out: list[Example | None] = []
        for example in self.examples:
            annotator = example.columns.get(self.annotator_column)
            said = (example.split, example.key, tuple(map(normal, example.completions)))
            first = seen.setdefault((*said, example.labels, None if annotator is None else str(annotator)), example)
            out.append(None if first is example else first)
        return out


def normal(text: str) -> str:
    """A text without what does not tell it from another: case and the width of white space."""
    return " ".join(text.casefold().split())


def read(files: Sequence[str], settings: Settings) -> Corpus:
    """The rows of all files.

    Raises:
        UserError: a file cannot be read, is of no known format, or has no row that can be used; or no row has a column
            that the user has named.
    """
    wanted = [(file, split) for file in files for split in (settings.splits if _has_splits(file) else (_TRAIN,))]
    labels = _labels(wanted)
    if twice := [label for i, label in enumerate(labels) if label in labels[:i]]:
        raise UserError(f"'{twice[0]}' is given twice; name each file and each split once")
    examples: list[Example] = []
    sources = []
    for (file, split), label in zip(wanted, labels, strict=True):
        kind = _WORLD.get(settings.kind, "preference")
        source = open_source(file, split=split, config=settings.config, kind=kind, size=settings.max_rows)
        report = RowReport(source=source.name)
        found = _read_source(source, label, report, settings, prefix=f"{label} " if len(wanted) > 1 else "")
        examples += found
        sources.append(
            SourceRead(
                name=source.name, path=source.path, split=label, rows=len(found), digest=source.digest, report=report
            )
        )
    default = Settings()
    for name, usual in zip(settings.named_columns, default.named_columns, strict=True):
        if name != usual and not any(name in example.columns for example in examples):
            raise UserError(f"no row of {', '.join(files)} has the column '{name}'")
    return Corpus(examples=examples, sources=sources, annotator_column=settings.annotator_column)


def _has_splits(file: str) -> bool:
    """Whether a source holds splits under names of their own: a hub dataset, a saved one, the built-in world."""
    path = Path(file).expanduser()
    return not path.exists() or (path / "dataset_dict.json").is_file()


def _labels(wanted: Sequence[tuple[str, str]]) -> list[str]:
    """What each source's rows are called: by its file without ending, or by its split; longer where two are alike."""
    short = [split if _has_splits(file) else _stem(file) for file, split in wanted]
    long = [f"{file}:{split}" if _has_splits(file) else file for file, split in wanted]
    return [b if short.count(a) > 1 else a for a, b in zip(short, long, strict=True)]


def _stem(file: str) -> str:
    name = Path(file).expanduser().resolve().name
    name = name[:-3] if name.lower().endswith(".gz") else name
    return Path(name).stem if Path(name).suffix.lower() in SUFFIXES else name


def _read_source(source: Source, label: str, report: RowReport, settings: Settings, prefix: str) -> list[Example]:
    records = list(islice(source.records(), settings.max_rows))
    if not records:
        raise UserError(f"'{source.name}' holds no rows")
    keys = common_keys([record.values for record in records[:_LOOKED_AT]])
    if not keys:
        first = records[0]
        why = first.error or f"it is {type(first.values).__name__}, not an object"
        raise UserError(f"'{source.name}' has no row that can be read: {first.place}: {why}")
    kind, fmt = _detect(keys, settings, source.name)
    report.format = str(fmt)
    known = keys | frozenset(settings.columns)
    examples = []
    for record in records:
        report.read += 1
        try:
            row = _parse(record, fmt, kind, known)
        except RowError as error:
            report.drop(error.reason, prefix + record.place)
            continue
        report.used += 1
        examples.append(_example(record, row, kind, label, prefix, settings))
    if not examples:
        reasons = "; ".join(f"{what} {value}" for what, value in report.lines() if what.startswith("dropped"))
        raise UserError(f"none of the {report.read} rows of '{source.name}' can be used: {reasons}")
    return examples


def _parse(record: Record, fmt: Format, kind: Purpose, known: frozenset[str]) -> Row:
    if record.error is not None:
        raise record.error
    return fmt.parse(record.values, kind, known)


def _detect(keys: frozenset[str], settings: Settings, name: str) -> tuple[Purpose, Format]:
    """What rows with these columns are for, and their format."""
    if settings.kind != "auto":
        return settings.kind, detect(keys, settings.kind, settings.columns, name)
    errors = []
    for kind in _TRIED:
        try:
            return kind, detect(keys, kind, settings.columns, name)
        except UserError as error:
            errors.append(str(error))
    if len(set(errors)) == 1:  # what is wrong with `columns` does not depend on what rows are for
        raise UserError(errors[0])
    raise UserError(
        f"'{name}' has the columns {', '.join(sorted(keys))}, which is no known format (docs/data.md lists them); "
        'name yours, for example --columns \'{"prompt": "question", "chosen": "good", "rejected": "bad"}\''
    )


def _sayable(value: Any) -> Any:
    """A cell with lone surrogates as escapes: its words come into the report, and no file or terminal takes them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [_sayable(part) for part in value]
    if isinstance(value, dict):
        return {_sayable(name): _sayable(part) for name, part in value.items()}
    return value


def _example(record: Record, row: Row, kind: Purpose, label: str, prefix: str, settings: Settings) -> Example:
    values = {name: record.values.get(name) for name in settings.named_columns}
    columns = {name: _sayable(value) for name, value in values.items() if value is not None}
    own = columns.get(settings.split_column)
    if isinstance(row.prompt, str):
        prompt = row.prompt
    else:
        prompt = "\n".join(m.content for m in row.prompt if m.role != "system")
    paired = len(row.completions) == 2  # also where UnpairedData would take it apart
    return Example(
        place=prefix + record.place,
        split=own.strip() if isinstance(own, str) and own.strip() else label,
        kind="preference" if paired else kind,
        key=prompt_key(row),
        messages=row.prompt,
        prompt=prompt,
        completions=row.completions,
        labels=None if paired else row.labels,
        raw=row.raw,
        columns=columns,
    )
