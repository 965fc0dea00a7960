"""A small module under manual optimisation that records everything Lightning does with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger

from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.resume import rewind, settle
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader

STEPS: dict[str, Any] = {"max_epochs": -1}
LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "epochs, validation at their ends": ({"estimate": True}, {"max_epochs": 3}),
    "epochs, no validation": ({"estimate": True}, {"max_epochs": 2, "limit_val_batches": 0}),
    "epochs, validation inside": ({}, {"max_epochs": 2, "val_check_interval": 2}),
    "steps, stop inside an epoch": ({"estimate": True}, {"max_steps": 14, **STEPS}),
    "steps, no validation": ({}, {"max_steps": 14, "limit_val_batches": 0, **STEPS}),
    "steps, validation across epochs": (
        {},
        {"max_steps": 11, "val_check_interval": 4, "check_val_every_n_epoch": None, **STEPS},
    ),
    "part of each epoch": ({"estimate": True}, {"max_epochs": 3, "limit_train_batches": 4}),
    "validation every other epoch": ({}, {"max_epochs": 3, "check_val_every_n_epoch": 2}),
    "two updates a batch": ({"updates": 2, "estimate": True}, {"max_steps": 22, **STEPS}),
}
"""Name -> (settings of the Recorder, of the Trainer): the ways a run goes through its batches and validations."""


class Rows(Logger):
    """A logger that keeps what it is given."""

    name, version, save_dir = "rows", 0, None

    def __init__(self, rows: list[Any] | None = None) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, tuple[tuple[str, float], ...]]] = [] if rows is None else rows

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, tuple(sorted(metrics.items()))))


class Recorder(L.LightningModule):
    """Linear regression on sample numbers, with a schedule; `events` lists batches, validations and epochs.

    Args:
        updates: optimizer steps per batch.
        estimate: build the schedule from `trainer.estimated_stepping_batches`.
    """

    def __init__(self, updates: int = 1, estimate: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.updates, self.estimate = updates, estimate
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)
        self.events: list[tuple[Any, ...]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = self.trainer.estimated_stepping_batches if self.estimate else 40
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.01, 1 - step / steps))
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: GroupBatch, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        x = batch.group_index.float()[:, None].expand(-1, 4) / 10
        for _ in range(self.updates):
            loss = (self.layer(x) - 1 + x[:, :1]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule.step()
        self.log("loss", loss, batch_size=1)
        ids = tuple(batch.group_index.tolist())
        self.events.append(("batch", self.trainer.current_epoch, self.trainer.global_step, batch_idx, ids))

    def validation_step(self, batch: GroupBatch, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.events.append(("validation", self.trainer.global_step, tuple(batch.group_index.tolist())))
        self.log("val", self.layer.weight.sum(), batch_size=1)

    def on_train_epoch_start(self) -> None:
        self.events.append(("epoch starts", self.trainer.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.events.append(("epoch ends", self.trainer.current_epoch, self.trainer.global_step))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        settle(self.trainer, checkpoint)

    def on_train_start(self) -> None:
        rewind(self.trainer)

    def end(self) -> tuple[Any, ...]:
        """Weights, moments, schedule and step as plain numbers."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        moments = [{k: v.tolist() for k, v in s.items()} for s in optimizer.state_dict()["state"].values()]
        weights = [p.tolist() for p in self.parameters()]
        return weights, moments, self.lr_schedulers().state_dict()["last_epoch"], self.trainer.global_step


def loaders(size: int = 12) -> tuple[StatefulLoader, StatefulLoader]:
    """Batches of 2 from `size` samples, and two validation batches."""

    def groups(n: int) -> list[Group]:
        return [Group(prompt=[1], completions=[[2]], index=i) for i in range(n)]

    train = StatefulLoader(groups(size), BatchOrder(SampleOrder(size, seed=1), batch_size=2))
    return train, StatefulLoader(groups(4), BatchOrder(SampleOrder(4, shuffle=False), batch_size=2))


class Eager:
    """A stateful loader that settles where it starts when `iter` is called, as most do."""

    def __init__(self) -> None:
        self.batches = list(loaders()[0])
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[GroupBatch]:
        return self._from(self.position % len(self))

    def _from(self, start: int) -> Iterator[GroupBatch]:
        for number in range(start, len(self)):
            self.position = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fit(
    folder: Path,
    callbacks: list[L.Callback],
    ckpt_path: Path | str | None = None,
    *,
    module: Recorder,
    train: Any = None,
    rows: list[Any] | None = None,
    **trainer: Any,
) -> list[Any]:
    """Fit on the CPU, on `loaders()` or another training loader; the rows its logger got, added to `rows` if given."""
    logger = Rows(rows)
    settings = {"max_epochs": 3, "plugins": [SafeCheckpointIO()], "log_every_n_steps": 1, **trainer}
    run = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )
    own, validation = loaders()
    run.fit(module, own if train is None else train, validation, ckpt_path=ckpt_path)
    return logger.rows
