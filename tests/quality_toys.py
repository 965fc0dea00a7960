"""Rows for checks of data, written as a user would have them and read by the readers of the data modules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.quality.reading import Corpus, read
from alignment.quality.settings import Settings


def pair(prompt: str, chosen: str, rejected: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **columns}


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as JSON lines; returns the file's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def corpus(folder: Path, rows: Sequence[Mapping[str, Any]], settings: Settings | None = None) -> Corpus:
    """One file of these rows, read."""
    return read([write(folder / "rows.jsonl", rows)], settings or Settings())
