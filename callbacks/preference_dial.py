"""Turns the dial of a policy with heads, and draws what each preference gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alignment import distributed
from alignment.dial import HasDial, Point, draw, grid, points_of, summary, to_json
from alignment.errors import UserError
from alignment.folders import run_folder
from alignment.tracking import TrackingLogger


class PreferenceDial(Callback):
    """Samples under a grid of preferences among the rewards, at the end of training and of `test`.

    It writes what each gave and their front: `dial.json` and `dial.png` (`test_dial` after a test) in the run's folder
    and among the artifacts of the MLflow run. Where heads hardly differ yet, all preferences give the same; it says so.

    It needs a policy with a head for each reward (modules.DecoupledPO); nothing is trained. Each point is one pass over
    the validation or test data. With K rewards there are (steps + K - 1)! / (steps! (K - 1)!) points: 15 for three
    rewards and the default.

    Args:
        steps: shares are multiples of 1 / steps.
        batches: most batches for each point. Null: all of the data.
    """

    def __init__(self, steps: int = 4, batches: int | None = None) -> None:
        if steps < 1 or (batches is not None and batches < 1):
            raise UserError(f"callbacks.PreferenceDial: steps is {steps} and batches {batches}; use at least 1")
        self.steps, self.batches = steps, batches
        self.points: list[Point] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, HasDial):
            raise UserError(
                f"callbacks.PreferenceDial needs a policy with heads (modules.DecoupledPO), not a "
                f"{type(pl_module).__name__}; leave the callback out"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After the last checkpoint: a sweep takes long, and may be interrupted."""
        self._sweep(trainer, pl_module, trainer.val_dataloaders, "dial")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sweep(trainer, pl_module, trainer.test_dataloaders, "test_dial")

    def _sweep(self, trainer: L.Trainer, module: L.LightningModule, data: Any, name: str) -> None:
        """A collective."""
        assert isinstance(module, HasDial)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if data is None:
            rank_zero_warn("callbacks.PreferenceDial has nothing to sample for: this run has no validation data")
            return
        before, names = module.dial, list(module.weights)
        settings, rows = grid(names, self.steps), []
        with trainer.precision_plugin.val_step_context():
            for weights in settings:
                if distributed.any_rank(trainer.received_sigterm, module.device):
                    break
                module.turn_dial(weights)
                rows.append(self._said(module, data, module.device))
        module.turn_dial(dict(zip(names, before, strict=True)))
        if len(rows) < len(settings):
            rank_zero_warn("callbacks.PreferenceDial leaves its sweep: the run was asked to stop")
            return
        self.points = points_of(settings, rows)
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            self._write(trainer, folder, name)

    def _said(self, module: HasDial, data: Iterable[Any], device: torch.device) -> list[dict[str, Any]]:
        """Rows of all ranks; only what the front needs travels."""
        batches = itertools.islice(data, self.batches)
        mine = [{"rewards": row["rewards"]} for batch in batches for row in module.judge(batch.to(device))]
        parts: Any = distributed.all_gather_objects(mine)
        return [row for part in parts for row in part]

    def _write(self, trainer: L.Trainer, folder: Path, name: str) -> None:
        table, picture = folder / f"{name}.json", folder / f"{name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            table.write_text(to_json(self.points), encoding="utf-8")
            draw(self.points, picture)
        except OSError as ex:
            rank_zero_warn(f"callbacks.PreferenceDial cannot write into {folder}: {ex}")
            return
        for logger in trainer.loggers:
            if isinstance(logger, TrackingLogger):
                for path in (table, picture):
                    logger.log_file(path)
        print(f"{summary(self.points)}: {picture}", flush=True)
