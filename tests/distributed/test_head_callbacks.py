"""Callbacks that watch several rewards decide alike on two processes, and as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ports import meeting_port
from tests.distributed.head_callbacks_checks import run

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path: Path) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting_port()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.head_callbacks_checks", str(tmp_path)],
            cwd=REPOSITORY,
            env={**os.environ, **shared, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    first, second = (json.loads((tmp_path / f"found.rank{rank}.json").read_text()) for rank in range(2))
    assert first["weights_equal"]
    for found in (first, second):
        found["place"].pop("due")
    assert first == second
    one: dict[str, Any] = run(1, tmp_path)
    one["place"].pop("due")
    for name in ("stalled", "entropy", "frozen", "bonus", "place", "global_step"):
        assert first[name] == pytest.approx(one[name]) if name in ("stalled", "entropy") else first[name] == one[name]
    assert first["place"]["row"] == 5
    for name in ("averages", "rates"):
        assert first[name] == pytest.approx(one[name], rel=1e-3)
