"""Pictures of several rewards at every evaluation: correlation, front, fusion weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alignment import distributed
from alignment.errors import UserError
from alignment.folders import run_folder
from alignment.fusion_profile import FusionProfile, HasProfile
from alignment.protocols import Judges
from alignment.reward_history import Evaluation, History, draw_fusion, draw_rewards, evaluation
from alignment.tracking import TrackingLogger


class RewardFigures(Callback):
    """Draws what the rewards of a validation say together. Files go into the run's folder and among the artifacts of
    the MLflow run, and grow by evaluation; the end of training is one, if updates came after the last validation.

        rewards.png        correlation of the rewards over the completions; for each pair of rewards the means at every
                           evaluation, and their front; its hypervolume
        fusion.png         for a policy with heads the mean fusion weight of each head, by place in the completion and
                           step
        test_rewards.png, validate_rewards.png   after `test` and `validate`: that one evaluation

    Metrics: `val/hypervolume`, of the front of all evaluations so far, and `val/reward_corr/NAME/OTHER`; `test/...`.

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
        self._collect(outputs)

    on_test_epoch_start, on_test_batch_end = on_validation_epoch_start, on_validation_batch_end

    def _collect(self, rows: Any) -> None:
        if isinstance(rows, list):
            self._rows += [row["rewards"] for row in rows if isinstance(row, Mapping) and "rewards" in row]

    # ------------------------------------------------------------------ writing

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A collective. An evaluation by itself, with settings of its own, is no point of the run's history."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._log(pl_module, "val", self._evaluate(trainer, pl_module, _step(trainer), History(), "validate_"))
        elif not trainer.sanity_checking:
            self._log(pl_module, "val", self._evaluate(trainer, pl_module, _step(trainer), self.history, ""))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A collective. Other prompts than those of the history: the front is this one point."""
        self._log(pl_module, "test", self._evaluate(trainer, pl_module, _step(trainer), History(), "test_"))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Where the last updates came after the last validation, what they led to is sampled now; the last checkpoint
        is written by then, and does not know of it. A collective."""
        data, done, last = trainer.val_dataloaders, self.history.evaluations, _step(trainer) - 1
        if trainer.fast_dev_run or data is None or not isinstance(pl_module, Judges):  # type: ignore[attr-defined]
            return
        if done and done[-1].step == last:
            return
        self._rows, most = [], trainer.num_val_batches[0]
        with trainer.precision_plugin.val_step_context():
            for batch in itertools.islice(data, None if most == math.inf else int(most)):
                self._collect(pl_module.judge(batch.to(pl_module.device)))
        found = self._evaluate(trainer, pl_module, last, self.history, "")
        told = {f"val/{name}": value for name, value in _told(found).items()}
        for logger in trainer.loggers if told else ():
            logger.log_metrics(told, step=last)

    def _evaluate(
        self, trainer: L.Trainer, module: L.LightningModule, step: int, history: History, prefix: str
    ) -> Evaluation | None:
        """Add the rows of all ranks to a history and draw it. None without any."""
        parts: Any = distributed.all_gather_objects(self._rows)
        rows, names = [row for part in parts for row in part], _names(module)
        # Fusion weights are those of training since the last evaluation; a test has none.
        profile = module.profile if isinstance(module, HasProfile) and not prefix else None
        weights = [] if profile is None else profile.take(module.device)
        if not rows or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        found = evaluation(step, rows, names, weights)
        history.add(found)
        volume = history.hypervolume({name: self.reference.get(name, 0.0) for name in names})
        found = replace(found, volume=volume)
        history.add(found)
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            self._draw(trainer, folder, history, names, profile, prefix)
        return found

    @staticmethod
    def _log(module: L.LightningModule, stage: str, found: Evaluation | None) -> None:
        for name, value in _told(found).items():
            module.log(f"{stage}/{name}", value, rank_zero_only=True)

    @staticmethod
    def _draw(
        trainer: L.Trainer,
        folder: Path,
        history: History,
        names: list[str],
        profile: FusionProfile | None,
        prefix: str,
    ) -> None:
        """What goes wrong with the disk is a warning: training does not depend on it."""
        pictures = [folder / f"{prefix}rewards.png"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw_rewards(history, names, pictures[0])
            if profile is not None and any(e.profile for e in history.evaluations):
                pictures.append(folder / "fusion.png")
                draw_fusion(history, names, profile.width, pictures[1])
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


def _told(found: Evaluation | None) -> dict[str, float]:
    """Metrics of an evaluation; no correlation with a reward that does not vary."""
    if found is None:
        return {}
    told = {"hypervolume": found.volume}
    for (a, first), (b, second) in itertools.combinations(enumerate(found.means), 2):
        if not math.isnan(value := found.correlation[a][b]):
            told[f"reward_corr/{first}/{second}"] = value
    return told


def _step(trainer: L.Trainer) -> int:
    """At which Lightning logs the metrics of an evaluation: the updates before the last one while training goes on, all
    of them after it."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _names(module: L.LightningModule) -> list[str]:
    """Of the rewards of a module that samples."""
    suite = getattr(module, "suite", None)
    return [] if suite is None else list(suite.names)
