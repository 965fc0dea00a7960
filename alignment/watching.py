"""What callbacks see of a module, and what they may change. Checked with `isinstance`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import lightning as L
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.head_config import FusionConfig
from alignment.head_steps import HeadSteps
from alignment.metrics import Metrics
from alignment.penalties import EntropyTerm
from alignment.rewards import RewardSuite
from alignment.schedulable import HasSchedulables, Schedulables


@runtime_checkable
class HasMetrics(Protocol):
    """A module that logs a callback's numbers with its own: `alignment.training.TrainingMixin`."""

    def note_values(self, values: Mapping[str, float]) -> None:
        """Metrics of the update or batch under way, the same on every rank."""


@runtime_checkable
class HasLastMetrics(HasSchedulables, Protocol):
    """A module that keeps the metrics of its last update, of this rank: `alignment.training.TrainingMixin`."""

    last_metrics: Metrics


@runtime_checkable
class Observed(HasSchedulables, Protocol):
    """A module that tells `alignment.protocols.MetricListener`s what it logs: `alignment.training.TrainingMixin`."""

    def note_own(self, metrics: Metrics) -> None:
        """Metrics of this rank alone, as (sum, count)."""


@runtime_checkable
class HasPairs(HasSchedulables, Protocol):
    """A module that learns from preference pairs of a data set: `modules.DPO`, `modules.SimPO` and their relatives.

    Attributes:
        before_batch: asked at the beginning of each training step: (the data's batch) -> the batch to train on. None:
            the data's. seed: of the run.
    """

    before_batch: Callable[[GroupBatch], GroupBatch] | None

    @property
    def seed(self) -> int: ...

    def compared(self, batch: GroupBatch) -> GroupBatch:
        """The batch with what its reference says, where there is one, so that it is not asked again."""
        ...

    def preference_gaps(self, batch: GroupBatch) -> Tensor:
        """[P] delta of each pair, in nats, without gradient; of a batch of any size."""
        ...


@runtime_checkable
class HasRewardGradients(HasMetrics, Protocol):
    """A module that can take the gradients of its rewards one by one: `modules.MORL`, `modules.DecoupledPO`.

    Attributes:
        gradient_names: the rewards it does so for, as `GradientListener` gets their norms; empty under settings that
            need only one gradient.
        gradient_factors: name -> factor on that reward's gradient before they are combined, 1 where there is none; a
            callback may move it.
        keeps_ratio: whether the module has a ratio of its own to keep.
    """

    gradient_names: tuple[str, ...]
    gradient_factors: dict[str, float]
    keeps_ratio: bool


@runtime_checkable
class HasHeads(HasMetrics, Protocol):
    """A module whose policy has a head for each reward: `alignment.headed.HeadedMixin`, which has the other attributes.

    Attributes:
        alpha: name -> mean fusion weight of each head that takes part in the update under way; a single 1 in a batch
            that belongs to one head.
        flat: name -> share of the groups of this batch in which the reward does not differ.
        clipped: name -> share of the tokens that gave its head no gradient in the last update, because they are
            outside the clip range.
    """

    weights: dict[str, float]
    fusion_config: FusionConfig
    fusion_entropy: float
    schedulables: Schedulables
    frozen: set[str]
    only: str | None
    head_steps: HeadSteps
    alpha: dict[str, float]
    flat: dict[str, float]
    clipped: dict[str, float]

    def claim_head(self, name: str, cause: str) -> None:
        """Say in a callback's `setup` that this cause may scale the learning rate of a head, so that the rate is logged
        from the first update on, and what a checkpoint holds of it stays."""

    def scale_head(self, name: str, cause: str, factor: float) -> None:
        """Multiply the learning rate of a head. Each cause has one factor, which replaces its last one."""


@runtime_checkable
class HasFeed(HasHeads, Protocol):
    """HasHeads, with batches from elsewhere.

    Attributes:
        feed: asked at the beginning of each training step: (the data's batch) -> the batch to train on. It may raise
            RolloutStopped on all ranks together. None: the data's.
        dynamic_sampling: how often dead groups are replaced by other prompts of the data. suite: the rewards.
    """

    feed: Callable[[GroupBatch], GroupBatch] | None
    dynamic_sampling: int
    batches_seen: int
    suite: RewardSuite


@runtime_checkable
class HasEntropyBonus(Protocol):
    """A module with an entropy bonus: `alignment.penalised.PenalisedMixin`.

    Attributes:
        entropy: the bonus; callbacks move its `strength`. entropy_possible: whether this policy can have one.
    """

    entropy: EntropyTerm
    entropy_possible: bool


def validates(trainer: L.Trainer) -> bool:
    """Whether a fit that is about to start has anything to validate on, as far as is known by then."""
    if not trainer.enable_validation:
        return False
    # Not trainer.val_dataloaders, which may be those of an earlier `validate`.
    loaders = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return loaders is None or sum(trainer.num_val_batches) > 0


def check_validates(trainer: L.Trainer, callback: L.Callback, watched: str) -> None:
    """Call it from `on_train_start`. Raise UserError where the callback would wait in vain for what it watches."""
    if not validates(trainer):
        raise UserError(
            f"callbacks.{type(callback).__name__} watches {watched} of validation, and this run has none: give it "
            "validation data (data.val_fraction, data.val_path, trainer.limit_val_batches), or leave the callback out"
        )


@runtime_checkable
class HasEvaluationFaults(Protocol):
    """A module that says what of its last evaluation was not finite: `alignment.training.TrainingMixin`.

    Attributes:
        evaluation_faults: names of metrics, `val/loss` for one, whose mean leaves something out for that reason; the
            same on every rank.
    """

    evaluation_faults: tuple[str, ...]
