"""What every module shares about training, whatever its model: manual optimisation through `update`, one optimizer and
schedule, metric windows, keyed randomness, and the state that shapes training in the checkpoint."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from alignment import distributed, randomness
from alignment import update as engine
from alignment.batches import GroupBatch
from alignment.devices import report_mixture
from alignment.errors import UserError
from alignment.guard import FiniteGuard
from alignment.metrics import Metrics, MetricWindow
from alignment.optim import SMALL_BATCH, OptimConfig, build_optimizer, build_schedule, peak_lr, refresh
from alignment.protocols import HasPurpose, MetricListener, SizedBatches
from alignment.resume import rewind, settle, stand_at
from alignment.schedulable import LR, Moved, Schedulable, Schedulables
from alignment.settings import as_config, holds_callable, plain
from alignment.sharding import in_step
from alignment.spread import clip_gradients
from alignment.stopping import droppable
from alignment.strategies import check_trainer

log = logging.getLogger(__name__)

STATE_KEY = "alignment"

DATA = {
    "supervised": ("rows to imitate", "SupervisedData"),
    "preference": ("preference pairs", "PreferenceData"),
    "unpaired": ("completions labelled good or bad", "UnpairedData"),
    "prompts": ("prompts", "PromptData"),
}
"""Purpose of data -> what its rows are, and the data module that gives them."""


class TrainingMixin(L.LightningModule):
    """Base of all modules. A subclass defines `loss(micro, counts)` and, for more than one update per batch, overrides
    `train_batch`.

    Args:
        optim: optimizer and schedule; a mapping of its fields is accepted too (checkpoints hold plain values).
        micro_batch_tokens: upper bound of tokens the model reads in one forward. It bounds memory and changes no
            result. None: the whole batch at once.
    """

    updates_per_batch: int = 1
    """Optimizer steps one batch leads to; the schedule's length counts with it."""

    loss_terms: Mapping[str, float] = {"loss": 1.0}
    """Metric name -> weight: what `val/loss` is composed of; empty for modules without one. Training logs the exact
    loss of each update instead."""

    shown: ClassVar[tuple[str, ...]] = ("loss",)
    """Training metrics in the progress bar."""

    reads: ClassVar[str | None] = None
    """What the data must be for: one of `DATA` (`protocols.HasPurpose`). None: anything."""

    fixed: ClassVar[tuple[str, ...]] = ()
    """Settings of a base class that this one decides itself and does not take."""

    moving: ClassVar[tuple[str, ...]] = ()
    """Attributes that callbacks may move during training (beta, ...): plain to assign and to read, and behind that a
    value of `schedulables`, which reads as what is in force."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls).get("moving", ()):
            setattr(cls, name, Moved(name))

    def __init__(self, *, optim: OptimConfig, micro_batch_tokens: int | None) -> None:
        super().__init__()
        if micro_batch_tokens is not None and micro_batch_tokens < 1:
            raise UserError(f"micro_batch_tokens is {micro_batch_tokens}; use a positive number, or null for no bound")
        self.automatic_optimization = False
        self.optim = as_config(OptimConfig, optim)
        self.micro_batch_tokens = micro_batch_tokens
        self.schedulables = Schedulables()
        self._rate = self.schedulables.register(Schedulable(LR, self.optim.lr, apply=self._apply_rate))
        self.before_batch: Callable[[GroupBatch], GroupBatch] | None = None  # a callback's: the batch to train on
        self.last_metrics: Metrics = {}  # of this rank, of the last update
        self.batches_seen = 0
        self.guard = FiniteGuard()
        self.dropout_on = False
        self._train_window = MetricWindow()
        self._eval_window = MetricWindow()
        self.evaluation_faults: tuple[str, ...] = ()  # metrics of the last evaluation that were partly not finite
        self._batch_size_noted = False
        self._saved_optim: Mapping[str, Any] | None = None  # of the checkpoint a fit resumes from

    # ------------------------------------------------------------------ what a module defines

    def loss(self, micro: GroupBatch, counts: engine.Counts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the batch's loss, and its metrics as (sum, count)."""
        raise TypeError(f"{type(self).__name__} must define loss(micro, counts), or override train_batch")

    def train_batch(self, batch: GroupBatch) -> None:
        """One batch of training: by default one update with `loss`."""
        self.update(self.whole_batch(batch), self.loss)

    def whole_batch(self, batch: GroupBatch) -> GroupBatch:
        """The batch with whatever `loss` must know of all of it, over all ranks, before it is cut into micro-batches.
        Called for training and evaluation alike, by every rank; `self.training` tells which it is."""
        return batch

    def micro_batches(self, batch: GroupBatch, *, keep_groups: bool = True) -> Iterator[GroupBatch]:
        """The batch in parts of at most `micro_batch_tokens` tokens. A collective where the model is sharded, and ranks
        with fewer parts then get empty ones behind theirs."""
        return in_step(self, batch.split(self.micro_batch_tokens, keep_groups=keep_groups), batch)

    def evaluation_metrics(self, batch: GroupBatch) -> Metrics:
        """Metrics of one validation or test micro-batch; by default those of `loss`."""
        return self.loss(batch, engine.UNIT)[1]

    def derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Metrics that are functions of whole-set means (perplexity, ...), not means themselves."""
        return {}

    def lr_factors(self) -> Mapping[str, float]:
        """Beginning of parameter names -> factor on their learning rate. Such a part has optimizer groups of its own,
        so that `alignment.optim.rescale` can change its rate."""
        return {}

    def part_norms(self) -> dict[str, float]:
        """Name -> L2 norm of the gradient of one part of the model, for `GradientListener`: the same on every rank.
        Called before `finish_gradients`."""
        return {}

    def finish_gradients(self, parameters: Sequence[nn.Parameter], norm: Tensor) -> bool:
        """The last change to an update's gradients, which are whole and finite: clipping to `optim.clip_norm`, by
        `norm` [], that of all of them together. False leaves the step out; ranks must agree."""
        if self.optim.clip_norm is not None:
            clip_gradients(parameters, self.optim.clip_norm, norm)
        return True

    # ------------------------------------------------------------------ training

    def setup(self, stage: str) -> None:
        """Refuse Trainer settings under which training would be wrong, and data for another purpose. A subclass that
        overrides this calls super."""
        check_trainer(self.trainer)
        report_mixture(self.trainer.strategy.root_device)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.reads is not None and isinstance(data, HasPurpose) and data.purpose != self.reads:
            (needed, wanted), (given, _) = DATA[self.reads], DATA[data.purpose]
            raise UserError(
                f"{type(self).__name__} learns from {needed}, and {type(data).__name__} gives {given}; use "
                f"datamodules.{wanted}"
            )

    def update(
        self,
        batch: GroupBatch,
        loss_fn: engine.LossFn,
        *,
        keep_groups: bool = True,
        counts: engine.Counts | None = None,
    ) -> None:
        """One optimizer step; see `alignment.update.update`."""
        engine.update(self, batch, loss_fn, keep_groups=keep_groups, counts=counts)

    def training_step(self, batch: GroupBatch, batch_idx: int) -> None:
        if self.before_batch is not None:
            batch = self.before_batch(batch)
        in_force = {f"schedule/{name}": value for name, value in self.schedulables.in_force().items()}
        if self.dropout_on:
            torch.manual_seed(randomness.derive(self.seed, "batch", self.batches_seen, distributed.rank()))
        with droppable(self):
            self.train_batch(batch)
        self.note_values(in_force)
        # Here and not in a hook: callbacks save at the end of the batch, before the module's own hook runs.
        self.batches_seen += 1
        if (self.trainer.fit_loop.total_batch_idx + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log_training_window()

    def on_train_start(self) -> None:
        rewind(self.trainer)
        if self._saved_optim is not None:
            optimizer, schedule = self.trainer.optimizers[0], self.lr_schedule
            # The peak rate may also differ by the large-batch rule, when the batch size is another one.
            changed = self._saved_optim != plain(self.optim) or optimizer.defaults["lr"] != schedule.base_lrs[0]
            refresh(optimizer, schedule, self.optim.weight_decay if changed else None)
            self._saved_optim = None
        self.schedulables.settle()  # callbacks have claimed theirs

    def on_train_epoch_end(self) -> None:
        self._log_training_window(epoch=True)

    def _log_training_window(self, *, epoch: bool = False) -> None:
        values = self._train_window.flush(self.device)
        self._tell(values, self._logged_step - epoch)
        # Lightning logs a value again and again until a new one comes: what this window has not seen must go.
        results: Any = self.trainer._results
        for key, item in list(results.items()):
            if item.meta.fx == "training_step" and item.meta.name not in values:
                del results[key]
        # The window has summed over ranks already; at an epoch's end Lightning warns unless it may do so again.
        for name, value in values.items():
            self.log(name, value, prog_bar=name in self.shown, batch_size=1, sync_dist=epoch)

    @property
    def _logged_step(self) -> int:
        """Step at which Lightning logs; at an epoch's end the one before."""
        return int(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _tell(self, values: Mapping[str, float], step: int) -> None:
        """Listeners get what is about to be logged."""
        for callback in self.trainer.callbacks if values else ():  # type: ignore[attr-defined]
            if isinstance(callback, MetricListener):
                callback.on_metrics(self.trainer, self, values, step)

    def note_update(self, *, loss: float, grad_norm: float, lr: float, metrics: Metrics) -> None:
        """Called by `update` with numbers that are the same on every rank, and with this rank's metrics."""
        self.last_metrics = metrics
        own = {k: v for k, v in metrics.items() if k != "loss"}  # of one update the exact loss is known
        self._train_window.update(own)
        self.note_values({"loss": loss, "grad_norm": grad_norm, "lr": lr})

    def note_values(self, values: Mapping[str, float]) -> None:
        """Metrics of the update or batch under way, the same on every rank."""
        if distributed.rank() == 0:
            one = torch.ones((), dtype=torch.float64)
            self._train_window.update({k: (torch.tensor(v, dtype=torch.float64), one) for k, v in values.items()})

    def note_own(self, metrics: Metrics) -> None:
        """Metrics of this rank alone, as (sum, count)."""
        self._train_window.update(metrics)

    def note_batch_size(self, groups: float) -> None:
        """Warn once about a batch so small that gradients are noisy. `groups` counts over all ranks."""
        if not self._batch_size_noted and 0 < groups < SMALL_BATCH and distributed.process() == 0:
            log.warning("a batch of %d groups: below %d gradients are noisy (data.batch_size)", groups, SMALL_BATCH)
        self._batch_size_noted = self._batch_size_noted or groups > 0

    @property
    def seed(self) -> int:
        """What `seed_everything` was given, else 0."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def nonfinite_steps(self) -> int:
        """Updates skipped because loss or gradient was not finite."""
        return self.guard.nonfinite

    # ------------------------------------------------------------------ evaluation

    def on_validation_epoch_start(self) -> None:
        self._eval_window = MetricWindow()

    def on_test_epoch_start(self) -> None:
        self._eval_window = MetricWindow()

    def validation_step(self, batch: GroupBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: GroupBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _evaluate(self, batch: GroupBatch) -> None:
        for micro in self.micro_batches(self.whole_batch(batch)):
            self._eval_window.update(self.evaluation_metrics(micro))

    def _log_evaluation(self, stage: str) -> None:
        """Metrics over the whole set and all ranks, each row or token weighing the same wherever it was batched."""
        values = self._eval_window.flush(self.device)
        bad = {name.removeprefix("nonfinite/") for name in values if name.startswith("nonfinite/")}
        bad |= {"loss"} if bad & self.loss_terms.keys() else set()
        self.evaluation_faults = tuple(f"{stage}/{name}" for name in sorted(bad))
        if not values:
            return
        if self.loss_terms:
            values["loss"] = sum(weight * values[name] for name, weight in self.loss_terms.items())
        values |= self.derived_metrics(values)
        named = {f"{stage}/{k}": v for k, v in values.items()}
        if not self.trainer.sanity_checking:
            self._tell(named, self._logged_step)
        self.log_dict(named, batch_size=1, sync_dist=True)

    # ------------------------------------------------------------------ optimizer and schedule

    def configure_optimizers(self) -> Any:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        size = data.batch_size if isinstance(data, SizedBatches) else None
        rate = peak_lr(self.optim, size)
        optimizer = build_optimizer(self.named_parameters(), self.optim, rate, self.lr_factors())
        schedule = build_schedule(optimizer, self.optim, self._total_steps(), self._rate_share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _total_steps(self) -> float:
        """Optimizer steps of the run: `max_steps`, else batches times updates per batch."""
        if self.optim.schedule == "constant":
            return math.inf
        if self.trainer.max_steps != -1 and self.updates_per_batch > 1:
            return self.trainer.max_steps
        return self.trainer.estimated_stepping_batches * self.updates_per_batch

    def _rate_share(self) -> float:
        """What callbacks have made of the configured learning rate; exactly 1 where nothing moves it."""
        return float(self._rate.value) / self.optim.lr

    def _apply_rate(self, value: float) -> None:
        if self._trainer is not None and self._trainer.optimizers:
            refresh(self._trainer.optimizers[0], self.lr_schedule, None)

    @property
    def lr_schedule(self) -> LambdaLR:
        schedule = self.lr_schedulers()
        assert isinstance(schedule, LambdaLR), "modules have exactly one schedule"
        return schedule

    def step_schedule(self) -> None:
        self.lr_schedule.step()

    # ------------------------------------------------------------------ state

    def training_state(self) -> dict[str, Any]:
        """Everything besides weights and moments that shapes training, JSON-able. Subclasses add to it."""
        return {
            "module": type(self).__name__,
            "batches_seen": self.batches_seen,
            "guard": self.guard.state_dict(),
            "moving": self.schedulables.state_dict(),
            "window": self._train_window.state_dict(self.device),
        }

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `training_state`. A setting given anew with another value than the run began with is kept.

        Raises UserError for the state of another class: its optimizer, step and schedule would go on here, and a
        reference would be the model from before that training. A subclass may go on from its base.
        """
        if state["module"] not in {cls.__name__ for cls in type(self).__mro__}:
            raise UserError(
                f"the checkpoint is of a {state['module']}, not of a {type(self).__name__}; to start from its weights, "
                "write them with `alignment export` and give that folder as policy.name"
            )
        self.batches_seen = int(state["batches_seen"])
        self.guard.load_state_dict(state["guard"])
        self._train_window.load_state_dict(state["window"])
        self.schedulables.load_state_dict(state["moving"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[STATE_KEY] = self.training_state()
        settle(self.trainer, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if STATE_KEY not in checkpoint:
            raise UserError("the checkpoint was not written by one of this project's modules: it has no training state")
        try:
            self.load_training_state(checkpoint[STATE_KEY])
        except KeyError as error:
            raise UserError(
                f"training state in the checkpoint lacks {error}: another version of this project or another module "
                "wrote it; to start from its weights, `alignment export` them and give that folder as policy.name"
            ) from error
        if self._trainer is not None and self._trainer.state.fn != TrainerFn.FITTING:
            stand_at(self._trainer, checkpoint)
        saved = checkpoint.get("hyper_parameters", {}).get("optim")
        if saved is None or self._trainer is None or self._trainer.state.fn != TrainerFn.FITTING:
            return
        if saved["optimizer"] != self.optim.optimizer:
            raise UserError(
                f"optim.optimizer is {self.optim.optimizer}, and the state in the checkpoint is that of "
                f"{saved['optimizer']}; keep the optimizer, or export the weights and start a new run from them"
            )
        self._saved_optim = saved

    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's, with dataclasses stored as plain mappings so that a checkpoint's state is JSON."""
        frame = inspect.currentframe()
        kwargs.setdefault("frame", frame.f_back if frame else None)
        super().save_hyperparameters(*args, **kwargs)
        for name, value in list(self.hparams.items()):
            self.hparams[name] = plain(value)
            if holds_callable(self.hparams[name]):
                del self.hparams[name]
                log.warning("checkpoints lack '%s': a callable in it has no import path; give it to load one", name)
