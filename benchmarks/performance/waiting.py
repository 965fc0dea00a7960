"""The callback that lets a run of ours go on one step at a time."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.performance import turns
from benchmarks.performance.shares import OneStep


class Turns(Callback):
    """Tells the parent of every batch, and waits before the next.

    Args:
        threads: of torch, in this process.
        profile: tell the operators of the second step too; a profiled step takes longer.
    """

    def __init__(self, threads: int, profile: bool = False) -> None:
        torch.set_num_threads(threads)
        self._profile = OneStep() if profile else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._go(turns.current().ready())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return  # it waits for the first process in the next collective
        loss = trainer.callback_metrics.get("train/loss")
        more: dict[str, Any] = {"vram_peak": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}
        if self._profile is not None:
            more |= self._profile.end()
        self._go(turns.current().done(loss=None if loss is None else float(loss), **more))
        if self._profile is not None and batch_idx == 0:
            self._profile.begin()

    @staticmethod
    def _go(on: bool) -> None:
        if not on:  # nothing is to be saved, and workers of rewards end with their parent
            os._exit(0)
