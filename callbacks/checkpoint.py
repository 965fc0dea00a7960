"""Saving while training: ModelCheckpoint for manual optimisation, with a pointer to the newest state to resume from."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from alignment import resume
from alignment.checkpoint import SafeCheckpointIO, point
from alignment.watching import HasEvaluationFaults


class Checkpoint(ModelCheckpoint):
    """Takes ModelCheckpoint's arguments. What differs:

    - `every_n_train_steps` saves at the first batch end at or past each multiple (a batch may make several optimizer
      steps and jump over it); `train_time_interval` works too. A save with a validation due at once waits for its end.
    - `last.ckpt` in the same folder always points at the newest saved state, replaced atomically. With a `monitor`, a
      state that is not among the best is kept as `resume-*.ckpt` until a newer one is there.
    - The final state is saved when training ends.
    - A state whose monitored value, or a part of it, is not finite is never among the best; it can be resumed from.
    - A save that the disk refused leaves the records as they were (`SafeCheckpointIO` reports it).
    """

    def __init__(self, **kwargs: Any) -> None:
        # The pointer replaces Lightning's copy of the last checkpoint, and replacing a folder is safe here.
        kwargs.update(save_last=None, enable_version_counter=kwargs.get("enable_version_counter", False))
        super().__init__(**kwargs)
        self._step_seen = 0
        self._resume_path = ""
        self._save_failed = False
        self._warned = False

    # ------------------------------------------------------------------ when

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        io = trainer.strategy.checkpoint_io
        if isinstance(io, SafeCheckpointIO):
            io.fallback = stage == "fit"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        resume.rewind(trainer)
        self._step_seen = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = self._multiple_passed(trainer) or self._interval_passed(trainer)
        self._step_seen = trainer.global_step
        if not due or self._should_skip_saving_checkpoint(trainer):
            return
        if resume.validates_next(trainer):
            self._defer_save_until_validation = True
        else:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._warn_of_monitor(trainer)
        deferred, self._defer_save_until_validation = self._defer_save_until_validation, False
        if deferred or (self._epoch_due(trainer) and not self._should_save_on_train_epoch_end(trainer)):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        if self._epoch_due(trainer) and self._should_save_on_train_epoch_end(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._warn_of_monitor(trainer)
            # A monitored value would be that of an earlier state by now.
            self._save(trainer, topk=self.monitor is None)

    def _warn_of_monitor(self, trainer: L.Trainer) -> None:
        """A misspelt `monitor` would never be seen, and no best state ever kept."""
        known = trainer.callback_metrics
        if self.monitor is not None and self.monitor not in known and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Checkpoint monitors '{self.monitor}', which nothing has logged so far, so no best state is kept; "
                f"there are {', '.join(sorted(known))}"
            )

    def _multiple_passed(self, trainer: L.Trainer) -> bool:
        every = self._every_n_train_steps
        return every > 0 and trainer.global_step // every > self._step_seen // every

    def _interval_passed(self, trainer: L.Trainer) -> bool:
        if self._train_time_interval is None or self._last_time_checked is None:
            return False
        passed = time.monotonic() - self._last_time_checked >= self._train_time_interval.total_seconds()
        # Clocks differ between ranks: rank 0 decides.
        passed = trainer.strategy.broadcast(passed)
        if passed:
            self._last_time_checked = time.monotonic()
        return passed

    def _epoch_due(self, trainer: L.Trainer) -> bool:
        return self._every_n_epochs > 0 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    # ------------------------------------------------------------------ what

    def save_now(self, trainer: L.Trainer) -> bool:
        """Save the state to resume from, whatever was saved before at this step. False when the disk refused it."""
        self._save_resume_point(trainer, self._monitor_candidates(trainer))
        return not self._save_failed

    def _save(self, trainer: L.Trainer, topk: bool = True) -> None:
        candidates = self._monitor_candidates(trainer)
        self._save_failed = False
        # Before the first validation there is no score to rank by, yet a state to resume from.
        if topk and self._ranks(trainer, candidates):
            self._save_topk_checkpoint(trainer, candidates)
        if self._save_failed:
            return
        if self._last_global_step_saved != trainer.global_step:
            self._save_resume_point(trainer, candidates)
        elif self._resume_path:
            self._retire_resume_point(trainer, "")

    def _ranks(self, trainer: L.Trainer, candidates: dict[str, Tensor]) -> bool:
        """Whether there is a score to rank by: one that is finite, of an evaluation that was."""
        if self.monitor is None:
            return True
        module = trainer.lightning_module
        partly = isinstance(module, HasEvaluationFaults) and self.monitor in module.evaluation_faults
        return self.monitor in candidates and not partly and bool(torch.isfinite(candidates[self.monitor]))

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        names = ("best_model_path", "best_model_score", "kth_best_model_path", "kth_value", "current_score")
        before = {name: getattr(self, name) for name in names} | {"best_k_models": dict(self.best_k_models)}
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        if self._save_failed:
            vars(self).update(before)

    def _save_resume_point(self, trainer: L.Trainer, candidates: dict[str, Tensor]) -> None:
        path = self.format_checkpoint_name(candidates, "resume-{epoch}-{step}")
        previous = self._resume_path
        self._resume_path = path
        self._save_checkpoint(trainer, path)
        self._resume_path = previous
        if not self._save_failed:
            self._retire_resume_point(trainer, path)

    def _retire_resume_point(self, trainer: L.Trainer, current: str) -> None:
        previous, self._resume_path = self._resume_path, current
        if previous and self._should_remove_checkpoint(trainer, previous, current):
            self._remove_checkpoint(trainer, previous)

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        trainer.save_checkpoint(filepath, self.save_weights_only)
        io = trainer.strategy.checkpoint_io
        failed = isinstance(io, SafeCheckpointIO) and io.failed_saves > 0
        # Only rank 0 writes, so only it knows.
        self._save_failed = trainer.strategy.broadcast(failed)
        if self._save_failed:
            return
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        last = Path(filepath).parent / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}"
        self.last_model_path = str(last)
        if trainer.is_global_zero:
            point(last, Path(filepath))
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        # What the failed save was to replace is still needed.
        if not self._save_failed:
            super()._remove_checkpoint(trainer, filepath)

    # ------------------------------------------------------------------ state

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        resume.settle(trainer, checkpoint)

    def state_dict(self) -> dict[str, Any]:
        mine = {"resume_path": self._resume_path, "deferred": self._defer_save_until_validation}
        return {**super().state_dict(), **mine}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._resume_path = state_dict["resume_path"]
        self._defer_save_until_validation = state_dict["deferred"]
