"""What `test_adapting.py` runs. Run directly, it is one rank of a two-process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from alignment import distributed
from alignment.tiny import tiny_tokenizer
from callbacks import BatchBeta, PlateauBeta, Stages, TargetKL
from datamodules import PreferenceData
from modules.dpo import DPO
from tests.distributed.online_modules_checks import SGD, same_on_all_ranks
from tests.distributed.pair import as_a_rank, fitted
from tests.toys import TINY
from tests.unit.test_planned import rows

STAGES: dict[str, Any] = {
    "warm": {"steps": 3, "values": {"beta": 0.05}},
    "fine": {
        "values": {"beta": {"end": 0.2}, "data.fraction": {"start": 0.3, "end": 1.0}},
        "mix": {"chat": {"end": 3}},
    },
}


class Rows(L.Callback):
    """Which rows each batch held, over all ranks, and the values in force."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.values: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        parts: Any = distributed.all_gather_objects(batch.group_index.tolist())
        self.rows.append(sorted(row for part in parts for row in part))
        self.values.append(module.schedulables.in_force())


def run(world: int, folder: Path) -> dict[str, Any]:
    """Two epochs of four batches of 5 of 20 pairs, so that ranks hold 3 and 2."""
    data = PreferenceData(
        rows(folder, 20),
        mix={"column": "source", "ratio": {"chat": 1, "code": 1, "math": 1}},  # type: ignore[arg-type]
        tokenizer=tiny_tokenizer(),
        cache_dir=None,
        val_fraction=0.0,
        val_path=rows(folder, 6, first=50),
        batch_size=5,
        seed=1,
    )
    module = DPO(policy=TINY, optim=SGD, beta=0.1, reference="copy")
    seen = Rows()
    stages = Stages(STAGES, confidence="model")
    watching = [stages, BatchBeta(), TargetKL(1e-3, horizon=20), PlateauBeta(patience=1), seen]
    fitted(world, folder, module, data, callbacks=watching, max_epochs=2)
    assert data.draws.confidence is not None
    return {
        "rows": seen.rows,
        "values": seen.values,
        "confidence": data.draws.confidence.tolist(),
        "batch": watching[1].state_dict(),
        "target": watching[2].state_dict(),
        "plateau": watching[3].state_dict(),
        "weights_equal": same_on_all_ranks(module),
    }


if __name__ == "__main__":
    as_a_rank(run)
