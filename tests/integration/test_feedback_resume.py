"""Killed while rows arrive, and resumed: no row is lost or trained on twice, as far as the final state knows."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from alignment.feedback_writer import append_row
from benchmarks import trials
from tests import feedback_runs

ROWS = 24


def pair(n: int) -> dict[str, str]:
    return {"prompt": f"Question {n}?", "chosen": f"yes {n}", "rejected": f"no {n}"}


def finished(path: Path, folder: Path) -> dict[str, Any]:
    """What a run ends with; resumed if it has a checkpoint."""
    process = feedback_runs.start(path, folder)
    process.join(120)
    assert process.exitcode == 0, (folder / "output.txt").read_text()[-2000:]
    final: dict[str, Any] = json.loads((folder / "final.json").read_text())
    return final


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.db"])
def test_killed_and_resumed_it_ends_the_same(kind: str, tmp_path: Path) -> None:
    """Bit for bit, with old rows drawn and others held out: killed inside a save, after rows were read beyond it."""
    path = tmp_path / kind
    for n in range(ROWS):
        append_row(path, pair(n))
    whole = finished(path, tmp_path / "whole")
    process = feedback_runs.start(path, tmp_path / "killed", die_at_sync=9)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert finished(path, tmp_path / "killed") == whole
    assert trials.batches(tmp_path / "killed") == trials.batches(tmp_path / "whole")


def test_rows_that_come_while_it_is_down(tmp_path: Path) -> None:
    """And a file that is rotated meanwhile, its last line torn at the kill: in the end each row was taken once."""
    path = tmp_path / "rows.jsonl"
    for n in range(16):
        append_row(path, pair(n))
    with path.open("a") as file:
        file.write('{"prompt": "Question 16?", "chosen": "yes')
    process = feedback_runs.start(path, tmp_path / "run", die_at_sync=9)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    with path.open("a") as file:
        file.write(' 16", "rejected": "no 16"}\n')
    path.rename(tmp_path / "rows.jsonl.1")
    for n in range(17, ROWS):
        append_row(path, pair(n))
    stream = finished(path, tmp_path / "run")["stream"]
    report = stream["report"]
    assert (report["read"], report["used"], report["dropped"]) == (ROWS, ROWS, {})
    assert [(place["name"], place["row"]) for place in stream["places"]] == [("rows.jsonl.1", 17), ("rows.jsonl", 7)]
    held = {number for number, _, _ in stream["held"]}
    seen = [number for batch in trials.batches(tmp_path / "run") for number in batch["ids"]]
    new = [number for at, number in enumerate(seen) if number not in seen[:at]]
    assert new == [number for number in range(ROWS) if number not in held]
    assert stream["met"] == len(new)
