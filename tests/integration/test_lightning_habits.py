"""What Lightning users expect of a module, for each of ours on the real data modules and the tiny policy."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger

from alignment.checkpoint import SafeCheckpointIO
from alignment.guard import TrainingDivergedError
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from callbacks import Checkpoint, Predictions
from datamodules import PreferenceData, SupervisedData
from datamodules.base import GroupData
from modules import DPO, SFT, RewardModel
from tests.toys import trainer

TINY = PolicyConfig(name="tiny")
OPTIM = OptimConfig(lr=2e-3, warmup_steps=1)

BUILD: dict[str, Callable[[], L.LightningModule]] = {
    "sft": lambda: SFT(policy=TINY, predict_tokens=4, optim=OPTIM),
    "reward_model": lambda: RewardModel(policy=TINY, members=2, optim=OPTIM),
    "dpo": lambda: DPO(policy=TINY, optim=OPTIM),
}


def data(name: str, folder: Path) -> GroupData:
    kind = SupervisedData if name == "sft" else PreferenceData
    return kind("world:support", batch_size=4, max_rows=24, max_eval_rows=6, cache_dir=str(folder / "data"))


@pytest.mark.parametrize("name", BUILD)
def test_fast_dev_run(name: str, tmp_path: Path) -> None:
    t = trainer(tmp_path, fast_dev_run=True)
    t.fit(BUILD[name](), datamodule=data(name, tmp_path))
    assert t.global_step == 1
    assert {"loss", "val/loss"} <= t.callback_metrics.keys()


@pytest.mark.parametrize("name", BUILD)
def test_overfit_batches(name: str, tmp_path: Path) -> None:
    losses: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    t = trainer(tmp_path, overfit_batches=1, max_epochs=12, callbacks=[Watch()])
    t.fit(BUILD[name](), datamodule=data(name, tmp_path))
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", BUILD)
def test_a_whole_run(name: str, tmp_path: Path) -> None:
    """limit_*_batches, EarlyStopping, top-k checkpoints, LearningRateMonitor and profiler; then test and predict."""
    checkpoint = Checkpoint(dirpath=tmp_path / "checkpoints", monitor="val/loss", save_top_k=2, filename="{epoch}")
    t = trainer(
        tmp_path,
        max_epochs=6,
        limit_train_batches=3,
        limit_val_batches=1,
        limit_test_batches=1,
        limit_predict_batches=1,
        logger=CSVLogger(tmp_path, name="", version="logs"),
        profiler="simple",
        enable_checkpointing=True,
        plugins=[SafeCheckpointIO()],
        callbacks=[
            checkpoint,
            # The third validation cannot be better by 100: it stops there.
            EarlyStopping(monitor="val/loss", patience=2, min_delta=100.0),
            LearningRateMonitor(logging_interval="step"),
            Predictions(),
        ],
    )
    module = BUILD[name]()
    t.fit(module, datamodule=data(name, tmp_path))
    assert t.current_epoch == 3
    assert t.global_step == 9
    assert len(checkpoint.best_k_models) == 2
    assert all(Path(path).is_dir() for path in checkpoint.best_k_models)
    assert checkpoint.best_model_score == min(checkpoint.best_k_models.values())
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["lr"]) for row in rows if row["lr"]]
    monitored = [float(row["lr-AdamW/matrices"]) for row in rows if row["lr-AdamW/matrices"]]
    # Cosine over 18 steps of which the first is the warm-up: lr at step s is 2e-3 (1 + cos(pi (s - 1) / 17)) / 2.
    expected = [2e-3, *(1e-3 * (1 + math.cos(math.pi * (s - 1) / 17)) for s in range(1, 9))]
    assert rates == pytest.approx(expected, rel=1e-5)
    assert len(monitored) == 9
    assert {"run_training_batch", "optimizer_step"} <= set(t.profiler.recorded_durations)  # type: ignore[attr-defined]

    tested = t.test(module, datamodule=data(name, tmp_path), ckpt_path="best", verbose=False)[0]
    assert math.isfinite(tested["test/loss"])
    source = data(name, tmp_path)
    t.predict(module, datamodule=source, ckpt_path="best", return_predictions=False)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "predictions.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]  # the first batch of four
    assert len(source.groups("predict")) == 6
    fields = {
        "sft": {"prompt", "completion", "references"},
        "reward_model": {"prompt", "chosen", "rejected", "reward_chosen", "reward_rejected"},
        "dpo": {"prompt", "chosen", "rejected", "logps_chosen", "reward_chosen", "reward_rejected"},
    }
    assert all(fields[name] <= set(line) for line in lines)


@pytest.mark.parametrize("name", BUILD)
def test_plain_model_checkpoint_works_too(name: str, tmp_path: Path) -> None:
    """Lightning's own callback and files, with the progress bar on."""
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", monitor="val/loss", save_top_k=2, filename="{epoch}")
    t = trainer(
        tmp_path,
        max_epochs=3,
        limit_train_batches=2,
        enable_checkpointing=True,
        enable_progress_bar=True,
        callbacks=[checkpoint, RichProgressBar()],
    )
    t.fit(BUILD[name](), datamodule=data(name, tmp_path))
    assert len(checkpoint.best_k_models) == len(list((tmp_path / "c").iterdir())) == 2
    assert checkpoint.best_model_score == min(checkpoint.best_k_models.values())
    assert {"loss", "v_num"} & set(t.progress_bar_metrics) == {"loss"}


def test_going_back_uses_our_checkpoints(tmp_path: Path) -> None:
    """The finite guard with `callbacks.Checkpoint` and safe folders: the weights return once, then the run stops."""

    class Poison(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
            if index >= 2:
                batch.weights.fill_(float("nan"))

    class Watch(L.Callback):
        sums: list[float]

        def __init__(self) -> None:
            self.sums = []

        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            self.sums.append(sum(float(p.detach().double().sum()) for p in module.parameters()))

    watch, module = Watch(), BUILD["sft"]()
    t = trainer(
        tmp_path,
        max_epochs=3,
        enable_checkpointing=True,
        plugins=[SafeCheckpointIO()],
        callbacks=[Checkpoint(dirpath=tmp_path / "c", every_n_train_steps=1), Poison(), watch],
    )
    with pytest.raises(TrainingDivergedError, match="nonfinite"):
        t.fit(module, datamodule=data("sft", tmp_path))
    assert module.guard.rolled_back  # type: ignore[union-attr]
    # Batches 2 to 4 of the first epoch (then it goes back), 5, and 2 to 4 of the second.
    assert module.nonfinite_steps == 7
    assert watch.sums[4] == watch.sums[1] != watch.sums[0]
