"""Beta that follows what training shows: a plateau of a score, the gaps of a batch's pairs, a distance to hold.

Each is one factor on a value of the module (`alignment.schedulable`), so that they go together with each other and with
callbacks.Stages: beta = what the stage says x plateau x batch x distance.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.controllers import AdaptiveKL, Plateau
from alignment.errors import UserError
from alignment.events import record_event
from alignment.pair_beta import PairBeta
from alignment.schedulable import HasSchedulables, Schedulable
from alignment.watching import HasLastMetrics, HasPairs, check_validates

KL = "kl.coefficient"
SCORES = ("val/rewards/accuracies", "val/accuracy", "val/reward")
"""Validation metrics of which more is better, whatever beta is."""
BATCH = "batch"
"""The cause of the factor that BatchBeta sets."""


def strength(module: L.LightningModule, value: str | None, here: str) -> Schedulable:
    """What holds the policy to its reference: `value`, else the module's beta, else its KL coefficient."""
    if not isinstance(module, HasSchedulables):
        raise UserError(f"{here} is for this project's modules, not for a {type(module).__name__}; leave it out")
    known = module.schedulables
    name = value or next((name for name in ("beta", KL) if name in known), None)
    if name is None:
        raise UserError(f"{here}: a {type(module).__name__} has neither beta nor {KL}; leave the callback out")
    return known.find(name, here)


class PlateauBeta(Callback):
    """Lowers beta when a validation score has not got better for some epochs: beta is multiplied, down to a floor.

    Event `plateau_beta`. It needs validation data.

    Args:
        monitor: the score. Null: the first of `val/rewards/accuracies` (preference pairs), `val/accuracy` (KTO) and
            `val/reward` (modules that sample) that is logged.
        mode: whether more (`max`) or less (`min`) is better.
        factor: what beta is multiplied by, each time.
        patience: epochs in a row without a new best, and as many again after each fall.
        min_delta: a score this much better than the best one is a new best.
        floor: a fall does not take beta below this.
        every: `epoch` counts epochs, each by the best of its validations; `check` counts validations.
        value: what is multiplied. Null: `beta`, or `kl.coefficient` for modules that sample.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        factor: float = 0.8,
        patience: int = 3,
        min_delta: float = 0.0,
        floor: float = 0.01,
        every: Literal["epoch", "check"] = "epoch",
        value: str | None = None,
    ) -> None:
        here = "callbacks.PlateauBeta"
        if not 0 < factor < 1 or not 0 <= floor < math.inf:
            raise UserError(f"{here}: factor is {factor} and floor {floor}; they are between 0 and 1, and at least 0")
        if mode not in ("max", "min") or every not in ("epoch", "check"):
            raise UserError(f"{here}: mode is '{mode}' and every '{every}'; they are max or min, and epoch or check")
        self.monitor, self.mode, self.factor, self.floor = monitor, mode, factor, floor
        self.every, self.value = every, value
        self.plateau = Plateau(patience=patience, min_delta=min_delta)
        self._best_of_epoch: float | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(**_told_apart(self))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        _claim(self, trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_validates(trainer, self, "a score")
        value = self.moved(pl_module)
        if value.writer is None and not value.configured > self.floor:
            what = f"{value.name} is {value.configured:g}, not above the floor of {self.floor:g}, so it cannot fall"
            raise UserError(f"callbacks.PlateauBeta: {what}; give a smaller floor")

    @property
    def cause(self) -> str:
        """Of its factor."""
        return "plateau" if self.monitor is None else f"plateau of {self.monitor}"

    def moved(self, module: L.LightningModule) -> Schedulable:
        """What it multiplies."""
        return strength(module, self.value, "callbacks.PlateauBeta")

    def _watched(self, trainer: L.Trainer) -> str:
        if self.monitor is not None:
            return self.monitor
        return next((name for name in SCORES if name in trainer.callback_metrics), SCORES[0])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        score = watched(trainer, self._watched(trainer), "callbacks.PlateauBeta")
        score = score if self.mode == "max" else -score
        if trainer.sanity_checking or not math.isfinite(score):
            return
        if self.every == "check":
            self._feed(trainer, pl_module, score)
        else:
            self._best_of_epoch = score if self._best_of_epoch is None else max(score, self._best_of_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        score, self._best_of_epoch = self._best_of_epoch, None
        if score is not None:
            self._feed(trainer, pl_module, score)

    def _feed(self, trainer: L.Trainer, module: L.LightningModule, score: float) -> None:
        if not self.plateau.update(score):
            return
        beta = self.moved(module)
        before, others = float(beta.value), beta.without(self.cause)
        lowest = self.floor / others if others > 0 else 0.0
        now = max(beta.factor(self.cause) * self.factor, min(lowest, beta.factor(self.cause)))
        beta.scale(self.cause, now)
        times = "epochs" if self.every == "epoch" else "validations"
        best = self.plateau.best if self.mode == "max" or self.plateau.best is None else -self.plateau.best
        record_event(
            trainer,
            "plateau_beta",
            f"{self._watched(trainer)} has not got better than {best:.4g} for {self.plateau.patience} {times}: "
            f"{beta.name} {before:.4g} -> {beta.value:.4g}",
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {"plateau": self.plateau.state_dict(), "best_of_epoch": self._best_of_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plateau.load_state_dict(state_dict["plateau"])
        self._best_of_epoch = state_dict["best_of_epoch"]


class BatchBeta(Callback):
    """beta-DPO (Wu et al. 2024, arXiv 2407.08639): leaves out the pairs whose gap is unusual, and gives each batch a
    beta by the gaps of the others. See `alignment.pair_beta`.

    It costs a pass of the policy over the batch without gradient, and spares the update of the pairs left out.
    Validation is under beta without this factor. A row that a batch holds twice (`data.mix` with more seats than rows)
    is one pair of the statistics and of the draw, and if kept is trained on twice. Metrics: `beta_dpo/mean`,
    `beta_dpo/deviation` (the moving averages, nats), `beta_dpo/kept`. It needs a module of preference pairs.

    Args:
        alpha: how strongly beta follows the gaps, per nat.
        drop: share of the pairs left out.
        momentum: share of the old value in the moving averages.
        smallest: lower bound of a batch's beta.
    """

    def __init__(self, alpha: float = 0.6, drop: float = 0.2, momentum: float = 0.9, smallest: float = 1e-3) -> None:
        if not 0 < smallest < math.inf:
            raise UserError(f"callbacks.BatchBeta: smallest is {smallest}; it is above 0")
        self.rule = PairBeta(alpha=alpha, drop=drop, momentum=momentum)
        self.smallest = smallest
        self._trainer: L.Trainer | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, HasPairs):
            raise UserError(
                f"callbacks.BatchBeta needs a module of preference pairs (modules.DPO), not a "
                f"{type(pl_module).__name__}; leave the callback out"
            )
        pl_module.schedulables.find("beta", "callbacks.BatchBeta").claim(BATCH)
        if stage == "fit":
            if pl_module.before_batch not in (None, self._choose):
                raise UserError("callbacks.BatchBeta: something else chooses the batches already; leave one out")
            self._trainer = trainer
            pl_module.before_batch = self._choose

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(pl_module, HasPairs) and pl_module.before_batch == self._choose:
            pl_module.before_batch = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_batch_end(trainer, pl_module)  # a checkpoint may have been made before its batch had ended

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HasPairs)
        pl_module.schedulables["beta"].unscale(BATCH)

    def _choose(self, batch: GroupBatch) -> GroupBatch:
        """The pairs of this rank that count, with beta set. A collective."""
        assert self._trainer is not None
        module = self._trainer.lightning_module
        assert isinstance(module, HasPairs)
        batch = module.compared(batch)
        names = torch.where(batch.group_index >= 0, batch.group_index, batch.group_key).tolist()
        mine = list(zip(names, module.preference_gaps(batch).double().tolist(), strict=True))
        parts = cast("list[list[tuple[int, float]]]", distributed.all_gather_objects(mine))
        # Of a row drawn twice the last digits may differ, by what it was batched with: the smaller gap counts.
        gap_of = dict(sorted((pair for part in parts for pair in part), reverse=True))
        rows = sorted(gap_of)
        gaps = [gap_of[row] for row in rows]
        if not gaps or not all(map(math.isfinite, gaps)):
            return batch  # the update will say what is wrong
        self.rule.update(gaps)
        kept = self.rule.keep(gaps, module.seed, module.batches_seen, rows)
        beta = module.schedulables["beta"]
        lowest = self.smallest / beta.without(BATCH)
        beta.scale(BATCH, max(self.rule.factor([gaps[i] for i in kept]), lowest))
        found = {**self.rule.state_dict(), "kept": len(kept) / len(gaps)}
        module.note_values({f"beta_dpo/{name}": value for name, value in found.items() if value is not None})
        chosen = {rows[i] for i in kept}
        return batch.select_groups([place for place, name in enumerate(names) if name in chosen])

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.rule.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rule.load_state_dict(state_dict)


class TargetKL(Callback):
    """Holds a measured distance from the reference near a target by a factor on beta (Ziegler et al. 2019, arXiv
    1909.08593): factor <- factor (1 + clip(measured / target - 1, -0.2, 0.2) rows / horizon), once a batch.

    A larger beta holds the policy closer. What is measured is a training metric: for DPO `kl/data`, which is taken on
    the data's own tokens, not on what the policy would say. For modules that sample `kl.target` does the same inside
    the module, on whole completions; it is that or this.

    Args:
        target: the distance to hold, in the unit of the metric.
        monitor: metric of an update. Null: `kl/data` where there are pairs, else `kl` (nats per token; in KTO per
            completion).
        horizon: pairs or prompts over which an error of one clips to a change of 20 %.
        ema: share of the old value in a moving average of the metric.
        value: what is multiplied. Null: `beta`, or `kl.coefficient` for modules that sample.
    """

    def __init__(
        self,
        target: float,
        monitor: str | None = None,
        horizon: int = 10_000,
        ema: float = 0.0,
        value: str | None = None,
    ) -> None:
        self.monitor, self.value = monitor, value
        self.controller = AdaptiveKL(coefficient=1.0, target=target, horizon=horizon, ema=ema)

    @property
    def state_key(self) -> str:
        return self._generate_state_key(**_told_apart(self))

    @property
    def cause(self) -> str:
        """Of its factor."""
        return "target" if self.monitor is None else f"target of {self.monitor}"

    def moved(self, module: L.LightningModule) -> Schedulable:
        """What it multiplies."""
        return strength(module, self.value, "callbacks.TargetKL")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.moved(pl_module).writer == "kl.target":
            raise UserError("callbacks.TargetKL and kl.target would both hold the KL; leave one of them out")
        _claim(self, trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: GroupBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, HasLastMetrics)
        name = self.monitor or ("kl/data" if isinstance(pl_module, HasPairs) else "kl")
        known = pl_module.last_metrics
        if distributed.any_rank(bool(known) and name not in known, pl_module.device):
            there = ", ".join(sorted(known))
            raise UserError(f"callbacks.TargetKL watches {name}, which no update reports; there is {there}")
        zero = torch.zeros((), dtype=torch.float64)
        total, count = known.get(name, (zero, zero))
        sums = [float(total), float(count), float(batch.num_prompts)]
        measured = distributed.all_reduce_sum(torch.tensor(sums, dtype=torch.float64, device=pl_module.device)).tolist()
        if measured[1]:
            self.controller.update(measured[0] / measured[1], int(measured[2]))
            self.moved(pl_module).scale(self.cause, self.controller.coefficient)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.controller.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.controller.load_state_dict(state_dict)


def _told_apart(callback: PlateauBeta | TargetKL) -> dict[str, str | None]:
    """By what a checkpoint tells several of a kind apart."""
    return {"value": callback.value} | ({} if callback.monitor is None else {"monitor": callback.monitor})


def _claim(callback: PlateauBeta | TargetKL, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Claim its value for its cause. Raises UserError where another of its kind would have the same factor on it."""
    value, kind = callback.moved(module), type(callback)
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        if other is callback or not isinstance(other, kind) or other.cause != callback.cause:
            continue
        if other.moved(module) is value:
            raise UserError(
                f"two callbacks.{kind.__name__} would have one factor on {value.name}; leave one of them out, or give "
                "each a monitor of its own"
            )
    value.claim(callback.cause)


def watched(trainer: L.Trainer, name: str, here: str) -> float:
    """A metric of the validation that has just ended. Raises UserError when it was not logged."""
    known = trainer.callback_metrics
    if name not in known:
        scores = ", ".join(sorted(other for other in known if other.startswith("val/")))
        raise UserError(f"{here} watches {name}, which is not logged; there is {scores or 'nothing'}")
    return float(known[name])
