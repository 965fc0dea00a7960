"""What `test_followed.py` runs. Run directly, it is one rank of a two-process group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from alignment import distributed
from alignment.feedback_writer import append_row
from alignment.tiny import tiny_tokenizer
from datamodules import FollowConfig, PreferenceData
from modules.dpo import DPO
from tests.distributed.online_modules_checks import SGD, same_on_all_ranks
from tests.distributed.pair import as_a_rank, fitted
from tests.toys import TINY


class Rows(L.Callback):
    """Which rows each batch held, over all ranks; after the first one more rows arrive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[list[int]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        parts: Any = distributed.all_gather_objects(batch.group_index.tolist())
        self.rows.append(sorted(row for part in parts for row in part))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 1 and trainer.is_global_zero:
            for n in range(9, 13):
                append_row(self.path, pair(n))
        trainer.strategy.barrier()


def pair(n: int) -> dict[str, str]:
    return {"prompt": f"Question {n}?", "chosen": f"yes {n}", "rejected": f"no {n}"}


def rows(world: int, folder: Path) -> Path:
    """The file of a run."""
    return folder / f"rows{world}.jsonl"


def write_rows(world: int, folder: Path) -> None:
    """Nine, a bad one among them; before there are ranks."""
    for n in range(9):
        append_row(rows(world, folder), pair(n) if n != 4 else {"prompt": "What?"})


def run(world: int, folder: Path) -> dict[str, Any]:
    """What `write_rows` wrote, then four rows more, in batches of five: ranks hold 3 and 2, or fewer where a round
    ends."""
    path = rows(world, folder)
    data = PreferenceData(
        str(path),
        tokenizer=tiny_tokenizer(),
        cache_dir=None,
        val_fraction=0.2,
        batch_size=5,
        seed=1,
        follow=FollowConfig(quiet=0.0, replay=0.4, memory=5, epoch=2),
    )
    module = DPO(policy=TINY, optim=replace(SGD, schedule="constant"), reference="copy")
    seen = Rows(path)
    trained = fitted(world, folder, module, data, callbacks=[seen], max_epochs=-1)
    state = data.stream.state_dict()
    return {
        "rows": seen.rows,
        "memory": state["memory"],
        "held": state["held"],
        "read": [place["row"] for place in state["places"]],
        "used": state["report"]["used_for"],
        "loss": float(trained.callback_metrics["val/loss"]),
        "weights_equal": same_on_all_ranks(module),
    }


if __name__ == "__main__":
    as_a_rank(run)
