"""Runs side by side: last metrics, settings that differ, replies to the same prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from alignment.diagnosis_source import Log

ABSENT = "-"
PLACES = ("trainer.logger", "trainer.default_root_dir", "ckpt_path", "config")
"""Beginnings of settings that say where a run is kept and not what it does."""


def last_metrics(log: Log) -> dict[str, float]:
    """name -> the value logged last."""
    found: dict[str, float] = {}
    for _, values in log.rows:
        found |= values
    return found


def metric_rows(logs: Sequence[Log], wanted: Sequence[str]) -> list[tuple[str, list[float | None]]]:
    """(name, value of each run or None) of metrics that match a pattern of `wanted`, those of all runs first."""
    last = [last_metrics(log) for log in logs]
    names = sorted({name for found in last for name in found if any(fnmatch(name, pattern) for pattern in wanted)})
    rows = [(name, [found.get(name) for found in last]) for name in names]
    return sorted(rows, key=lambda row: row[1].count(None))


def setting_rows(logs: Sequence[Log]) -> list[tuple[str, list[str]]]:
    """(dotted key, value of each run) of settings that are not the same in all."""
    keys = dict.fromkeys(key for log in logs for key in log.settings if not key.startswith(PLACES))
    rows = [(key, [log.settings.get(key, ABSENT) for log in logs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def reply_rows(logs: Sequence[Log], count: int) -> list[tuple[str, list[str]]]:
    """(prompt, reply of each run) at the last evaluation, for the first `count` prompts that all of them answered."""
    answered = [_replies(log.folder) for log in logs]
    shared = [prompt for prompt in answered[0] if all(prompt in replies for replies in answered)]
    return [(prompt, [replies[prompt] for replies in answered]) for prompt in shared[:count]]


def _replies(folder: Path | None) -> dict[str, str]:
    """prompt -> its first completion at the last evaluation, as `callbacks.Samples` wrote them."""
    path = None if folder is None else folder / "samples.jsonl"
    if path is None or not path.is_file():
        return {}
    # Not splitlines(): JSON text may hold other line separators (U+2028) as they are.
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[Mapping[str, Any]] = [json.loads(line) for line in lines if line]
    found: dict[str, str] = {}
    for row in _latest(rows):
        found.setdefault(row["prompt"], row["completion"])
    return found


def _latest(rows: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    step = max((row["step"] for row in rows), default=None)
    return (row for row in rows if row["step"] == step)
