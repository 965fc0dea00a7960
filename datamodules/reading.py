"""Raw rows of a source: local json, jsonl, csv, tsv, txt (each also as .gz), parquet, a folder, a hub id, the built-in
world or generators of reasoning-gym. Nothing here judges a row's content; a row that cannot even be read carries its
RowError instead of values.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment import programming, world
from alignment.errors import UserError
from datamodules.gym import PREFIX, Generators
from datamodules.rows import RowError

if TYPE_CHECKING:
    import datasets

WORLD = "world:support"
CODE = "world:code"
_TABLES = (".csv", ".tsv")
SUFFIXES = (".json", ".jsonl", *_TABLES, ".parquet", ".txt")
_ENDINGS = f"{', '.join(SUFFIXES)}, each but parquet also with .gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One raw row: where it stands (rows and lines count from 1) and its values, or why there are none."""

    place: str
    values: Any = None
    error: RowError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A readable source. `digest` changes when the content does; `records` reads it anew at each call."""

    name: str
    path: str
    split: str
    digest: str
    records: Callable[[], Iterator[Record]]


def open_source(path: str, *, split: str, config: str | None, kind: world.Kind, size: int | None) -> Source:
    """The source behind `path`: a local file or folder, `world:support`, `world:code`, `reasoning-gym:TASKS`, else a
    hub dataset.

    `kind` chooses the rows of the built-in world, `size` their number and that of generated ones. Raises UserError when
    there is nothing to read.
    """
    if not path.strip():  # as a path it would be the working folder
        raise UserError("the name of a data file is empty; give a file, a folder, a hub id or world:support")
    if path == CODE:
        return _open_code(split, kind)
    if path.startswith("world:"):
        return _open_world(path, split, kind, size)
    if path.startswith(PREFIX):
        return _open_gym(path, split, size)
    local = Path(path).expanduser()
    if local.is_dir():
        if (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file():
            return _open_saved(local, split)
        return _open_files(local, sorted(p for p in local.iterdir() if _suffix(p) in SUFFIXES), split)
    if local.is_file():
        if _suffix(local) not in SUFFIXES:
            raise UserError(f"cannot read '{path}': known endings are {_ENDINGS}")
        return _open_files(local, [local], split)
    if _suffix(local) in SUFFIXES or local.is_absolute() or path.startswith((".", "~")):
        raise UserError(f"there is no file or folder '{path}'")
    return _open_hub(path, split, config)


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


# ---------------------------------------------------------------------- sources


def _open_world(path: str, split: str, kind: world.Kind, size: int | None) -> Source:
    if path != WORLD:
        raise UserError(f"the built-in world is called '{WORLD}' and the programming tasks '{CODE}', got '{path}'")
    if split not in ("train", "val", "test"):
        raise UserError(f"'{WORLD}' has the splits train, val and test, got '{split}'")
    rows = world.load(kind, split, size=size)  # type: ignore[arg-type]
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return Source(name=f"{path} ({kind})", path=path, split=split, digest=digest, records=lambda: _numbered(iter(rows)))


def _open_code(split: str, kind: world.Kind) -> Source:
    if split != "train":
        raise UserError(f"'{CODE}' has one split, train, got '{split}'; val_fraction holds some of it out")
    if kind == "preference":
        raise UserError(f"'{CODE}' has prompts and their solutions, no pairs; use PromptData or SupervisedData")
    rows = programming.rows(kind)
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return Source(name=f"{CODE} ({kind})", path=CODE, split=split, digest=digest, records=lambda: _numbered(iter(rows)))


def _open_gym(path: str, split: str, size: int | None) -> Source:
    made = Generators(path, size)

    def records() -> Iterator[Record]:
        for place, row in made.rows():
            yield Record(place=place, error=row) if isinstance(row, RowError) else Record(place=place, values=row)

    return Source(name=path, path=path, split=split, digest=made.digest, records=records)


def _open_hub(path: str, split: str, config: str | None) -> Source:
    import datasets  # here: it takes a second, and files of other kinds than its own do not need it

    try:
        data = datasets.load_dataset(path, config, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"'{path}' is no local file, and its split '{split}' cannot be loaded from the hub: {reason}"
        ) from error
    return _from_dataset(data, path, split)


def _open_saved(folder: Path, split: str) -> Source:
    import datasets

    data = datasets.load_from_disk(str(folder))
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(f"'{folder}' has the splits {', '.join(data)}, got '{split}'")
        data = data[split]
    return _from_dataset(data, str(folder), split)


def _from_dataset(data: datasets.Dataset, path: str, split: str) -> Source:
    return Source(name=path, path=path, split=split, digest=data._fingerprint, records=lambda: _numbered(iter(data)))


def _open_files(path: Path, files: list[Path], split: str) -> Source:
    if not files:
        raise UserError(f"folder '{path}' holds no data file; known endings are {_ENDINGS}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\x00" + hashlib.sha256(file.read_bytes()).digest())

    def records() -> Iterator[Record]:
        for file in files:
            prefix = "" if len(files) == 1 else f"{file.name} "
            yield from _read_file(file, prefix)

    return Source(name=str(path), path=str(path), split=split, digest=digest.hexdigest(), records=records)


def _numbered(rows: Iterator[Any]) -> Iterator[Record]:
    for i, values in enumerate(rows, start=1):
        yield Record(place=f"row {i}", values=values)


# ---------------------------------------------------------------------- files


def _read_file(file: Path, prefix: str) -> Iterator[Record]:
    suffix = _suffix(file)
    if suffix == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"'{file}' is not a readable parquet file: {str(error).splitlines()[0]}") from error
        yield from (Record(place=prefix + r.place, values=r.values) for r in _numbered(iter(rows)))
        return
    raw, cut = _bytes(file)
    if raw[:2] in _UTF16:
        raise UserError(f"'{file}' is in UTF-16; save it as UTF-8")
    # Undecodable bytes become lone surrogates, so that they are found row by row (datamodules.rows.text).
    content = raw.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")
    if suffix in _TABLES:
        yield from _read_table(file, content, "\t" if suffix == ".tsv" else ",", prefix, cut)
    elif suffix == ".txt":
        yield from _read_lines(content, prefix, cut, lambda line: {"text": line})
    elif suffix == ".json" and (found := _array(content)) is not None:
        yield from _read_array(*found, prefix)
    else:
        yield from _read_lines(content, prefix, cut, json.loads)


def _bytes(file: Path) -> tuple[bytes, bool]:
    """(content, whether a compressed file is cut off or damaged: then what could be read)."""
    raw = file.read_bytes()
    packed = raw.startswith(_GZIP_START)
    if file.suffix.lower() != ".gz":
        if packed:
            raise UserError(f"'{file}' is compressed; rename it to '{file.name}.gz'")
        return raw, False
    if raw and not packed:
        raise UserError(f"'{file}' is not compressed; rename it to '{file.stem}'")
    out = bytearray()
    # Small bites: what a bite holds before the damage is lost with it.
    bites = [raw[i : i + 1024] for i in range(0, len(raw), 1024)]
    member = zlib.decompressobj(_GZIP)
    try:
        for bite in bites:
            while bite:
                if member.eof:  # a gzip file may hold several members, one after the other
                    member = zlib.decompressobj(_GZIP)
                out += member.decompress(bite)
                bite = member.unused_data
    except zlib.error:
        return bytes(out), True
    return bytes(out), not member.eof


_GZIP = 31  # zlib's name for "with a gzip header"
_GZIP_START = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CUT = RowError("the file is cut off or damaged here")


def _read_lines(content: str, prefix: str, cut: bool, parse: Callable[[str], Any]) -> Iterator[Record]:
    """One row per line; blank lines are no rows. Only line feeds end a line: JSON text may hold other separators."""
    lines = content.split("\n")
    for i, line in enumerate(lines, start=1):
        place = f"{prefix}row {i}"
        line = line.removesuffix("\r").removeprefix("\ufeff")
        if cut and i == len(lines):
            yield Record(place=place, error=_CUT)
        elif line.strip():
            yield _parsed(place, line, parse)


def json_line(place: str, line: str) -> Record:
    """A line of JSON as a row."""
    return _parsed(place, line.removesuffix("\r").removeprefix("\ufeff"), json.loads)


def _parsed(place: str, line: str, parse: Callable[[str], Any]) -> Record:
    try:
        return Record(place=place, values=parse(line))
    except RecursionError:
        return Record(place=place, error=RowError("not valid JSON", "nested too deeply"))
    except ValueError as error:
        return Record(place=place, error=RowError("not valid JSON", str(error)))


def _array(content: str) -> tuple[str, int] | None:
    """(content, position after the bracket) of the array of rows in a .json file; None when it holds JSON lines.

    The array is the file itself or the only list in one object, such as `{"version": 1, "data": [...]}`.
    """
    start = content.lstrip()
    if start.startswith("["):
        return content, content.index("[") + 1
    first = start.split("\n", 1)[0]
    try:
        json.loads(first)
    except ValueError:
        try:
            whole = json.loads(content)
        except ValueError:
            return None
        return _only_list(whole)
    return _only_list(json.loads(first)) if first == start.strip() else None


def _only_list(whole: Any) -> tuple[str, int] | None:
    lists = [value for value in whole.values() if isinstance(value, list)] if isinstance(whole, dict) else []
    return (json.dumps(lists[0]), 1) if len(lists) == 1 and all(isinstance(row, dict) for row in lists[0]) else None


def _read_array(content: str, position: int, prefix: str) -> Iterator[Record]:
    """Rows of a JSON array one by one, so that a file cut off in the middle still gives the rows before the cut."""
    decoder = json.JSONDecoder()
    i = 0
    while True:
        position = _skip(content, position, " \t\r\n")
        if position < len(content) and content[position] == "]":
            return
        i += 1
        place = f"{prefix}row {i}"
        try:
            values, position = decoder.raw_decode(content, position)
        except RecursionError:
            yield Record(place=place, error=RowError("not valid JSON", "nested too deeply"))
            return
        except ValueError:
            yield Record(place=place, error=_CUT)
            return
        yield Record(place=place, values=values)
        position = _skip(content, position, " \t\r\n")
        if position < len(content) and content[position] == ",":
            position += 1
        elif position >= len(content) or content[position] != "]":
            yield Record(place=f"{prefix}row {i + 1}", error=_CUT)
            return


def _skip(content: str, position: int, characters: str) -> int:
    while position < len(content) and content[position] in characters:
        position += 1
    return position


def _read_table(file: Path, content: str, delimiter: str, prefix: str, cut: bool) -> Iterator[Record]:
    """Rows of a table with a header; a row with more cells than the header cannot be trusted to be aligned."""
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    try:
        header = list(reader.fieldnames or ())
    except csv.Error as error:
        raise UserError(f"the header of '{file}' cannot be read: {error}") from error
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise UserError(f"'{file}' has two columns called '{twice[0]}'; rename one")
    rows: list[Record] = []
    while True:
        place = f"{prefix}row {len(rows) + 1}"
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            rows.append(Record(place=place, error=RowError("not a valid table row", str(error))))
            continue
        if None in values:
            cells = len(values) - 1 + len(values[None])
            rows.append(Record(place=place, error=RowError("more cells than the header", f"{cells} cells")))
        else:
            rows.append(Record(place=place, values=values))
    if cut:  # the last row may end anywhere and still look whole
        place = rows.pop().place if rows else f"{prefix}row 1"
        rows.append(Record(place=place, error=_CUT))
    yield from rows
