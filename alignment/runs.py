"""Where runs live: `<root>/runs/<experiment>/<run>/`, holding `run.json`, `metrics.jsonl`, `config/`, `checkpoints/`.

Nothing a user or a configuration names can lead out of that folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.checkpoint import CheckpointError, resolve
from alignment.checkpoint_folder import complete
from alignment.errors import UserError

RECORD = "run.json"
_SAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 80
_NAMED = 3
"""Most newer runs that a line names."""


def safe_name(text: str) -> str:
    """A folder name that stays one folder deep. Names it had to change get a hash, so that two of them stay apart."""
    name = _SAFE.sub("_", text).lstrip(".")[:_LONGEST]
    if name and name == text:
        return name
    return f"{name or 'unnamed'}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"


def run_folder(root: Path, experiment: str, run: str) -> Path:
    """The folder of one run. `experiment` and `run` may be any text."""
    return root / "runs" / safe_name(experiment) / safe_name(run)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `run.json`: what the run is called and what it trains, for finding it again without the tracker."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The `run.json` of a run folder; None where there is none or it cannot be read (a run killed while starting)."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return record if isinstance(record, dict) else None


def find_runs(root: Path, experiment: str | None, **wanted: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Runs of an experiment (None: of any) whose record has every `wanted` value, newest first: by when they were last
    trained, or evaluated if they never were."""
    found = []
    parents = [root / "runs" / safe_name(experiment)] if experiment is not None else (root / "runs").glob("*")
    for folder in (run for parent in parents if parent.is_dir() for run in parent.iterdir()):
        record = read_record(folder)
        if record is not None and all(record.get(key) == value for key, value in wanted.items()):
            found.append((float(record.get("started", 0.0)), folder, record))
    for _, folder, record in sorted(found, key=lambda item: (item[0], item[1].name), reverse=True):
        yield folder, record


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The checkpoint that `last` or `best` means.

    Args:
        folder, record: its run.
        checkpoint: its folder.
        note: names newer runs that have none, "" if there are none.
    """

    folder: Path
    record: dict[str, Any]
    checkpoint: Path
    note: str


def find_checkpoint(name: str, root: Path, experiment: str | None, **wanted: Any) -> Found | None:
    """`last` or `best` of the newest run that has one, among the trained ones with every `wanted` value.

    None where no run has any checkpoint. Raises UserError where some have, but none has a `best` one.
    """
    newer: list[str] = []
    told = ""
    for folder, record in find_runs(root, experiment, **wanted):
        if not record.get("trains", True):
            continue
        try:
            checkpoint = resolve(name, folder / "checkpoints")
        except CheckpointError as ex:
            newer.append(label(folder, record))
            if not told and complete(folder / "checkpoints"):
                told = f"run {label(folder, record)}: {ex}"
            continue
        more = f" and {len(newer) - _NAMED} more" if len(newer) > _NAMED else ""
        note = f"newer runs without a {name} checkpoint: {', '.join(newer[:_NAMED])}{more}" if newer else ""
        return Found(folder=folder, record=record, checkpoint=checkpoint, note=note)
    if told:
        raise UserError(told)
    return None


def named_checkpoint(name: str, root: Path, wanted: dict[str, str]) -> Path:
    """The folder meant by a path, or by `last` or `best` in the newest run below `root` that has such a checkpoint."""
    if name not in ("last", "best"):
        if wanted:
            raise UserError(f"--{next(iter(wanted))} chooses among runs, and '{name}' is one checkpoint")
        return Path(name)
    if "model" in wanted and "." not in wanted["model"]:
        wanted = {**wanted, "model": f"modules.{wanted['model']}"}
    found = find_checkpoint(name, root, None, **wanted)
    if found is None:
        asked = "".join(f" with {key} {value}" for key, value in wanted.items())
        raise UserError(f"no run{asked} below {root / 'runs'} has a {name} checkpoint; give its folder")
    print(f"{name} is {found.checkpoint}, of run {label(found.folder, found.record)}")
    if found.note:
        print(found.note)
    return found.checkpoint


def label(folder: Path, record: dict[str, Any]) -> str:
    """A run in a line: the name of its folder, its module, and what the user called it."""
    words = [record.get("model"), f"'{record['run_name']}'" if record.get("run_name") else None]
    return " ".join([folder.name, *(word for word in words if word)])
