"""What `test_doctor.py` runs. Run directly, it is one rank of a two-process group."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from alignment import distributed
from alignment.diagnosis_series import History
from callbacks import Doctor
from modules import DPO
from tests.toys import OPTIM, TINY, FixedData, groups, trainer


class Drift(L.Callback):
    """The last rank's weights leave those of the others before the batch `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if module.batches_seen == self.at and distributed.rank() == distributed.world_size() - 1:
            with torch.no_grad():
                next(module.policy.parameters()).view(-1)[0] += 1e-6


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
    found = {"whole": observed(world, folder / "whole", -1), "drifted": observed(world, folder / "drifted", 2)}
    (folder / f"results.rank{distributed.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(2, Path(sys.argv[1]))
