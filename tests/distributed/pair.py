"""Two processes that meet, for checks that a module of this folder makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.ports import meeting_port

REPOSITORY = Path(__file__).resolve().parents[2]


def run_pair(checks: str, folder: Path, timeout: float) -> None:
    """`python -m tests.distributed.CHECKS FOLDER` as ranks 0 and 1; both end well within so many seconds."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting_port()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.distributed.{checks}", str(folder)],
            cwd=REPOSITORY,
            env={**os.environ, **shared, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)[-4000:]
