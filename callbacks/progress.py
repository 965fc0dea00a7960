"""The progress bar of a run that nobody gave another one."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from rich.progress import BarColumn

BAR = 8
"""Characters of the bar itself."""


class Progress(RichProgressBar):
    """Takes RichProgressBar's arguments. What differs: the run's id, which the first line of a run names in full, takes
    no place in the bar; and at the end of training it prints the monitored value, now and at its best.
    """

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        """With a short bar, so that counts, times, loss and reward fit into a line of 80 characters."""
        columns: list[Any] = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = BAR
        return columns

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        items: dict[str, Any] = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        return items

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        saver = trainer.checkpoint_callback
        if not isinstance(saver, ModelCheckpoint) or saver.monitor not in trainer.callback_metrics:
            return
        best = "" if saver.best_model_score is None else f", at best {float(saver.best_model_score):.4g}"
        if trainer.is_global_zero:
            print(f"{saver.monitor}: {float(trainer.callback_metrics[saver.monitor]):.4g} at the end{best}", flush=True)
