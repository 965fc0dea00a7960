"""From raw rows to tokenised groups: read, understand, check, tokenise, count; and a cache of the result on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from alignment.batches import Group
from alignment.chat import ChatEncoder, Encoded, Message, Template, TemplateRefused, TrainOn, tokenizer_digest
from alignment.errors import UserError
from datamodules.formats import LABEL, Format, Purpose, Row, common_keys, detect, renamed, wrong_type
from datamodules.reading import Record, Source
from datamodules.rows import Lengths, RowError, RowReport
from datamodules.store import DamagedCache, GroupStore

_VERSION = 1  # of what this file makes of a row: raise it when that changes, and every cache is made anew
_LOOKED_AT = 100  # rows that decide the format

log = logging.getLogger(__name__)

OnBadRow = Literal["skip", "stop"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every setting that decides what rows become. `required` names data columns that a row must have; the other fields
    are explained in `datamodules.base.GroupData`."""

    purpose: Purpose
    columns: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    template: Template = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    train_on: TrainOn = "last"
    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    max_rows: int | None = None
    allow_special: bool = False
    keep_duplicates: bool = False
    on_bad_row: OnBadRow = "skip"
    required: tuple[str, ...] = ()

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
        """The tokenisation this recipe asks for."""
        return ChatEncoder(
            tokenizer=tokenizer,
            template=self.template,
            template_kwargs=self.template_kwargs,
            max_prompt_tokens=self.max_prompt_tokens,
            max_completion_tokens=self.max_completion_tokens,
            max_tokens=self.max_tokens,
            allow_special=self.allow_special,
        )


def cache_key(source: Source, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over the content of the source, the recipe and the tokenizer: equal key, equal groups."""
    parts = {
        "version": _VERSION,
        "source": source.digest,
        "recipe": asdict(recipe),
        "tokenizer": tokenizer_digest(tokenizer),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The groups of a source, the report on its rows, and the key that says what they were made of."""

    source: Source
    store: GroupStore
    report: RowReport
    key: str


def prepare(source: Source, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None) -> Prepared:
    """Tokenise a source, or take it from the cache when it is there whole.

    Raises UserError at the first bad row under `on_bad_row="stop"`, and when no row can be used.
    """
    key = cache_key(source, recipe, tokenizer)
    file = None if cache_dir is None else cache_dir / f"{key}.safetensors"
    if file is not None and file.is_file():
        try:
            store, report = GroupStore.load(file)
            report.source = source.name
            return Prepared(source=source, store=store, report=report, key=key)
        except DamagedCache as error:
            log.warning("Cached rows are damaged and made anew: %s", error)
    store, report = _Builder(source, recipe, tokenizer).build()
    if file is not None:
        try:
            store.save(file, report)
        except OSError as error:  # a folder that cannot be written costs time at the next start, not this run
            log.warning("Tokenised rows are not kept in cache_dir '%s': %s", file.parent, error)
    return Prepared(source=source, store=store, report=report, key=key)


def read_row(record: Record, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[Group, int]:
    """(one row by itself, the digest of its prompt). Raises RowError or TemplateRefused when it cannot be used. `name`
    is that of its source."""
    if record.error is not None:
        raise record.error
    if not isinstance(record.values, dict):
        raise wrong_type(record.values)
    renamed(record.values, recipe.columns)  # it says what is missing
    source = Source(name=name, path=name, split="train", digest="", records=lambda: iter([record]))
    keys, builder = common_keys([record.values]), _Builder(source, recipe, tokenizer)
    try:
        fmt = detect(keys, recipe.purpose, recipe.columns, name)
    except UserError as error:
        columns = ", ".join(sorted(keys)) or "none"
        raise RowError(f"row is of no {recipe.purpose} format", f"it has the columns {columns}") from error
    builder._add(0, record, fmt, keys)
    return builder._groups[0], builder._keys[0]


def prompt_key(row: Row) -> int:
    """63-bit digest of what a row asks, blind to case and white space. Rows without a prompt are told apart by text."""
    if isinstance(row.prompt, str):
        asked = [row.prompt or row.completions[0]]
    else:
        asked = [f"{m.role}\x1f{m.content}" for m in row.prompt if m.role != "system"]
    words = " ".join(" ".join(asked).casefold().split())
    return _digest(words)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _row_values(row: Row) -> dict[str, list[float]]:
    """Named numbers, one per completion."""
    if row.labels is not None:
        return {LABEL: [float(label) for label in row.labels]}
    return {} if row.margin is None else {"margin": [row.margin] * len(row.completions)}


class _Builder:
    """One pass over the rows of a source."""

    def __init__(self, source: Source, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self._source, self._recipe = source, recipe
        self._encoder = recipe.encoder(tokenizer)
        self._report = RowReport(source=source.name)
        self._seen: dict[int, str] = {}
        self._groups: list[Group] = []
        self._keys: list[int] = []
        self._cut = {"prompt": 0, "completion": 0}

    def build(self) -> tuple[GroupStore, RowReport]:
        records = islice(self._source.records(), self._recipe.max_rows)
        head = list(islice(records, _LOOKED_AT))
        keys = common_keys([r.values for r in head])
        if head and not keys:
            raise UserError(f"'{self._source.name}' has no row that can be read: {self._why(head[0])}")
        if not head:
            raise UserError(f"'{self._source.name}' holds no rows")
        fmt = detect(keys, self._recipe.purpose, self._recipe.columns, self._source.name)
        self._report.format = str(fmt)
        known = keys | frozenset(self._recipe.columns)
        for index, record in enumerate(chain(head, records)):
            self._report.read += 1
            try:
                self._add(index, record, fmt, known)
            except (RowError, TemplateRefused) as error:
                self._drop(record.place, error)
        return self._finish()

    def _why(self, record: Record) -> str:
        return f"{record.place}: {record.error or 'it is ' + type(record.values).__name__ + ', not an object'}"

    def _drop(self, place: str, error: RowError | TemplateRefused) -> None:
        if self._recipe.on_bad_row == "stop":
            raise UserError(f"'{self._source.name}' {place}: {error}; mend it, or set on_bad_row: skip") from error
        self._report.drop(error.reason if isinstance(error, RowError) else str(error), place)

    def _add(self, index: int, record: Record, fmt: Format, keys: frozenset[str]) -> None:
        if record.error is not None:
            raise record.error
        row = fmt.parse(record.values, self._recipe.purpose, keys)
        for name in self._recipe.required:
            if row.columns.get(name) is None:
                raise RowError(f"{name} is None" if name in row.columns else f"key '{name}' is missing")
        self._check_new(row, record.place)
        encoded = self._encode(row)
        count = len(row.completions)
        self._groups.append(
            Group(
                prompt=encoded.prompt,
                completions=encoded.completions,
                scored=encoded.scored,
                weights=None if row.weight is None else [row.weight] * count,
                rows=_row_values(row),
                columns=row.columns,
                index=index,
            )
        )
        self._keys.append(prompt_key(row))
        self._cut["prompt"] += encoded.cut_prompt
        self._cut["completion"] += encoded.cut_completions
        for key in sorted(k for k in record.values if isinstance(k, str) and k not in keys):
            self._report.remark(f"extra key '{key[:40]}'", record.place)

    def _check_new(self, row: Row, place: str) -> None:
        if self._recipe.keep_duplicates:
            return
        asked = row.prompt if isinstance(row.prompt, str) else [(m.role, m.content) for m in row.prompt]
        said = [asked, row.completions] if row.labels is None else [asked, row.completions, row.labels]
        digest = _digest(json.dumps(said))
        if digest in self._seen:
            raise RowError("duplicate of an earlier row", f"of {self._seen[digest]}")
        self._seen[digest] = place

    def _encode(self, row: Row) -> Encoded:
        prompt = row.prompt
        if self._recipe.system and not isinstance(prompt, str) and prompt[0].role != "system":
            prompt = (Message("system", self._recipe.system), *prompt)
        if self._recipe.template == "raw" and not isinstance(prompt, str) and [m.role for m in prompt] == ["user"]:
            prompt = prompt[0].content  # one text, which only its format made a message
        encoded = self._encoder.encode(prompt, row.completions, raw=row.raw, train_on=self._recipe.train_on)
        if encoded.empty:
            raise RowError("completion has no token left within the limits")
        if len(encoded.completions) == 2 and encoded.completions[0] == encoded.completions[1]:
            raise RowError("chosen equals rejected within the limits")
        return encoded

    def _finish(self) -> tuple[GroupStore, RowReport]:
        report, recipe = self._report, self._recipe
        report.used = len(self._groups)
        if not self._groups:
            reasons = "; ".join(f"{what} {value}" for what, value in report.lines() if what.startswith("dropped"))
            raise UserError(f"none of the {report.read} rows of '{self._source.name}' can be used: {reasons}")
        rows = list(self._completions())
        report.prompt = Lengths.of([len(g.prompt) for g in self._groups], recipe.max_prompt_tokens, self._cut["prompt"])
        if recipe.purpose != "prompts":
            report.completion = Lengths.of(rows, recipe.max_completion_tokens, self._cut["completion"])
        return GroupStore.of(self._groups, self._keys), report

    def _completions(self) -> Iterator[int]:
        return (len(c) for g in self._groups for c in g.completions)
