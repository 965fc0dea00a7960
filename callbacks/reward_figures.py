"""Pictures of several rewards at every evaluation: correlation, front, fusion weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alignment import distributed
from alignment.errors import UserError
from alignment.folders import run_folder
from alignment.fusion_profile import FusionProfile, HasProfile
from alignment.reward_history import History, draw_fusion, draw_rewards, evaluation
from alignment.tracking import TrackingLogger


class RewardFigures(Callback):
    """Draws what the rewards of a validation say together. Files go into the run's folder and among the artifacts of
    the MLflow run, and grow by evaluation:

        rewards.png   correlation of the rewards over the completions; for each pair of rewards the means at every
                      evaluation, and their front; its hypervolume
        fusion.png    for a policy with heads the mean fusion weight of each head, by place in the completion and step

    Metrics: `val/hypervolume`, of the front of all evaluations so far, and `val/reward_corr/NAME/OTHER`.

    It needs a module whose validation steps return rows with `rewards` (those that sample do) and at least two rewards.

    Args:
        reference: name -> the reward from which the hypervolume is measured; means below it add nothing. Names that
            are left out: 0.
        bins: most bins of places in the completion.
    """

    def __init__(self, reference: dict[str, float] | None = None, bins: int = 16) -> None:
        if bins < 1:
            raise UserError(f"callbacks.RewardFigures: bins is {bins}; use at least 1")
        self.reference, self.bins = dict(reference or {}), bins
        self.history = History()
        self._rows: list[Mapping[str, float | None]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        names = _names(pl_module)
        if len(names) < 2:
            raise UserError(
                f"callbacks.RewardFigures needs a module with at least two rewards; {type(pl_module).__name__} has "
                f"{len(names)}; leave the callback out"
            )
        if unknown := sorted(set(self.reference) - set(names)):
            raise UserError(
                f"callbacks.RewardFigures: reference names {', '.join(unknown)}, no reward; use {', '.join(names)}"
            )
        if stage == "fit" and isinstance(pl_module, HasProfile):
            pl_module.profile = FusionProfile(names, self.bins, pl_module.sampling.max_tokens)

    # ------------------------------------------------------------------ collecting

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rows = []

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if isinstance(outputs, list):
            self._rows += [row["rewards"] for row in outputs if isinstance(row, Mapping) and "rewards" in row]

    # ------------------------------------------------------------------ writing

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A collective."""
        if trainer.sanity_checking or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        parts: Any = distributed.all_gather_objects(self._rows)
        rows, names = [row for part in parts for row in part], _names(pl_module)
        profile = pl_module.profile if isinstance(pl_module, HasProfile) else None
        weights = [] if profile is None else profile.take(pl_module.device)
        if not rows:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # which Lightning logs the metrics at
        found = evaluation(step, rows, names, weights)
        self.history.add(found)
        volume = self.history.hypervolume({name: self.reference.get(name, 0.0) for name in names})
        self.history.add(replace(found, volume=volume))
        pl_module.log("val/hypervolume", volume, rank_zero_only=True)
        for a, first in enumerate(names):
            for b in range(a + 1, len(names)):
                if (value := found.correlation[a][b]) == value:
                    pl_module.log(f"val/reward_corr/{first}/{names[b]}", value, rank_zero_only=True)
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            self._draw(trainer, folder, names, profile)

    def _draw(self, trainer: L.Trainer, folder: Path, names: list[str], profile: FusionProfile | None) -> None:
        """What goes wrong with the disk is a warning: training does not depend on it."""
        pictures = [folder / "rewards.png"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw_rewards(self.history, names, pictures[0])
            if profile is not None and any(e.profile for e in self.history.evaluations):
                pictures.append(folder / "fusion.png")
                draw_fusion(self.history, names, profile.width, pictures[1])
        except OSError as ex:
            rank_zero_warn(f"callbacks.RewardFigures cannot write into {folder}: {ex}")
            return
        for logger in trainer.loggers:
            if isinstance(logger, TrackingLogger):
                for path in pictures:
                    logger.log_file(path)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return self.history.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state_dict(state_dict)


def _names(module: L.LightningModule) -> list[str]:
    """Of the rewards of a module that samples."""
    suite = getattr(module, "suite", None)
    return [] if suite is None else list(suite.names)
