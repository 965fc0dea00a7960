"""What `test_doctor.py` runs. Run directly, it is one rank of a two-process group."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from alignment import devices, distributed
from alignment.diagnosis_series import History
from benchmarks.doctor_faults import Drift
from callbacks import Doctor
from modules import DPO
from tests.toys import OPTIM, TINY, FixedData, groups, trainer


class Lines(logging.Handler):
    """What this rank warns of."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def observed(world: int, folder: Path, at: int) -> dict[str, Any]:
    """Six batches of preference pairs, looked at after each."""
    doctor = Doctor(every=1)
    run = trainer(
        folder,
        callbacks=[doctor, Drift(at)],
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=6,
        limit_val_batches=0,
    )
    run.fit(DPO(policy=TINY, optim=OPTIM), datamodule=FixedData(groups(4, 2), batch_size=4))
    history: History = doctor.examination.history
    return {
        "history": history.state_dict(),
        "alarms": [alarm.state_dict() for alarm in doctor.examination.alarms],
        "lines": [alarm.line() for alarm in doctor.examination.alarms],
    }


def run_all(world: int, folder: Path) -> None:
    heard, kinds = Lines(), ("A100", "H100")
    logging.getLogger(devices.__name__).addHandler(heard)
    whole = observed(world, folder / "whole", -1)
    alike = len(heard.lines)
    devices.device_kind = lambda device: kinds[distributed.rank()]  # as in a job over two machines
    drifted = observed(world, folder / "drifted", 2)
    found = {"whole": whole, "drifted": drifted, "devices": [alike, heard.lines[alike:]]}
    (folder / f"results.rank{distributed.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(2, Path(sys.argv[1]))
