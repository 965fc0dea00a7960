"""Two processes that meet, for checks that a module of this folder makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from alignment import distributed
from benchmarks.ports import meeting_port
from tests.toys import trainer

REPOSITORY = Path(__file__).resolve().parents[2]


def run_pair(checks: str, folder: Path, timeout: float, processes: int = 2) -> None:
    """`python -m tests.distributed.CHECKS FOLDER` as ranks 0, 1, ...; all end well within so many seconds."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting_port())}
    shared = {**meet, "NODE_RANK": "0", "WORLD_SIZE": str(processes)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.distributed.{checks}", str(folder)],
            cwd=REPOSITORY,
            env={**os.environ, **shared, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * processes, "\n".join(outputs)[-4000:]


def of_two(checks: str, folder: Path, timeout: float) -> list[dict[str, Any]]:
    """What both ranks wrote as JSON."""
    run_pair(checks, folder, timeout)
    return [json.loads((folder / f"results.rank{rank}.json").read_text()) for rank in range(2)]


def of_one(run_all: Callable[[int, Path], object], folder: Path) -> dict[str, Any]:
    """What the same checks write in this process alone."""
    run_all(1, folder)
    found: dict[str, Any] = json.loads((folder / "results.rank0.json").read_text())
    return found


def fitted(world: int, folder: Path, module: L.LightningModule, data: Any, **settings: Any) -> L.Trainer:
    """Train as one of so many ranks."""
    share = {"devices": world, "strategy": "ddp" if world > 1 else "auto", "num_sanity_val_steps": 0}
    run = trainer(folder, **share, **settings)
    run.fit(module, datamodule=data)
    return run


def as_a_rank(run: Callable[[int, Path], dict[str, Any]]) -> None:
    """What the checks find as one rank of two, for `of_two`."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found = run(2, folder)
    (folder / f"results.rank{distributed.rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()  # else one of its threads may end the process with a fault
