"""What callbacks, data modules and the engine may expect of each other, so that callbacks never import modules and the
engine never imports either. All are checked with `isinstance`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, runtime_checkable

import lightning as L
import numpy as np
from torch import nn

from alignment.batches import Group, GroupBatch
from alignment.schedulable import Schedulables

if TYPE_CHECKING:
    from alignment.logprobs import LogProbEngine
    from alignment.policy import PolicyConfig
    from alignment.transforms import Stage, Transform


@runtime_checkable
class GradientListener(Protocol):
    """A callback that wants gradients as the batch produced them: over all ranks and micro-batches, before clipping.

    Lightning's `on_before_optimizer_step` fires after clipping under manual optimisation. Called only for finite steps.
    `norms` holds "total", the L2 norm over all trainable parameters, and any named part the module measured.
    """

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Mapping[str, float]) -> None: ...


@runtime_checkable
class MetricListener(Protocol):
    """A callback that wants what a module logs, as it logs it: of each window of training and of each evaluation, the
    latter with `val/` or `test/` before their names. The same on every rank."""

    def on_metrics(
        self, trainer: L.Trainer, module: L.LightningModule, values: Mapping[str, float], step: int
    ) -> None:
        """`step`: at which loggers get them."""


@runtime_checkable
class StopSource(Protocol):
    """A callback that knows when a run was asked to leave, and how (`callbacks.Signals`). See `alignment.stopping`."""

    def stop_requested(self) -> bool:
        """Whether any rank was asked, as far as this one knows. Cheap, no collective."""
        ...

    def drop_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state from before the batch under way and leave. A collective, called inside a training or
        validation step before any update of it. Returns when no rank was asked to leave."""


@runtime_checkable
class TakesBack(Protocol):
    """A training loader that can go back by one batch."""

    def put_back(self) -> None:
        """The batch given last was not used: what `state_dict` returns from now on stands before it."""


@runtime_checkable
class SizedBatches(Protocol):
    """A data module that knows how many groups one optimizer step sees, over all ranks."""

    batch_size: int


@runtime_checkable
class HasPurpose(Protocol):
    """A data module whose rows are for one kind of algorithm: `supervised`, `preference`, `unpaired` or
    `prompts`."""

    purpose: str


@runtime_checkable
class FiniteGroups(Protocol):
    """A data module whose rows are all known after `setup`: the reference's log-probs can be computed once, ahead."""

    def groups(self, split: Literal["train", "val", "test", "predict"]) -> Sequence[Group]: ...


@runtime_checkable
class Follows(Protocol):
    """A data module that may take in rows while a run trains: `datamodules.followed.FollowedData`.

    Attributes:
        follow: how. None: all rows are known after `setup`.
    """

    follow: object | None


def follows(data: object) -> bool:
    """Whether more rows may arrive while a run trains."""
    return isinstance(data, Follows) and data.follow is not None


def is_finite(data: object) -> TypeGuard[FiniteGroups]:
    """Whether all rows are known after `setup`."""
    return isinstance(data, FiniteGroups) and not follows(data)


class Rows(Protocol):
    """Rows that say what they hold: `datamodules.store.GroupStore`."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Group: ...

    def values(self, name: str) -> np.ndarray | None:
        """[P] a named number of each row; None where rows have none."""
        ...

    def columns(self) -> Sequence[Mapping[str, object]]:
        """P mappings: the rows' other values."""
        ...


@runtime_checkable
class PlansData(Protocol):
    """A data module whose mix and rows in use may move during training: `datamodules.base.GroupData`.

    Attributes:
        schedulables: `data.fraction`, and `data.mix.NAME` of each stratum or source.
    """

    schedulables: Schedulables

    def plan(self) -> None:
        """They are going to. Call it in a callback's `setup`. Raises UserError where they cannot."""

    def freeze(self, confidence: np.ndarray) -> None:
        """[n]: from now on the rows in use are those of the highest confidence."""

    def groups(self, split: Literal["train", "val", "test", "predict"]) -> Rows: ...


@runtime_checkable
class TakesTransforms(Protocol):
    """A module whose policy a callback may change before it is used: `alignment.module.PolicyMixin`."""

    policy_config: PolicyConfig

    def register_transform(self, stage: Stage, transform: Transform) -> None:
        """Add a step (`alignment.transforms`); call it in a callback's `setup`."""


@runtime_checkable
class HasEngine(Protocol):
    """A module with a policy that scores tokens: `alignment.module.PolicyMixin`, once it is built."""

    engine: LogProbEngine


@runtime_checkable
class Judges(Protocol):
    """A module that samples and scores prompts outside of a loop: `alignment.online.OnlineMixin`."""

    def judge(self, batch: GroupBatch) -> list[dict[str, Any]]:
        """Rows of sampled completions, with the mapping `rewards`: name -> value, None where it abstained."""
        ...


@runtime_checkable
class PolicyArchive(Protocol):
    """Policies of earlier steps, weights alone: `alignment.fp8.Fp8Archive`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the policies, the one kept last at the end."""
        ...

    def restore(self, module: nn.Module, name: str) -> None:
        """Give the module the weights kept under this name, in place. Every rank calls it."""
        ...


@runtime_checkable
class HasArchive(Protocol):
    """A callback that keeps policies: `callbacks.Fp8PolicyArchive`."""

    archive: PolicyArchive
