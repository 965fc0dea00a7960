"""A module whose loss compares the policy with where it started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from alignment import memory
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.experience import REF_LOGPS
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.protocols import FiniteGroups, HasPurpose, SizedBatches, follows, is_finite
from alignment.reference import ReferenceKind
from alignment.reference_cache import tokenizer_digest
from alignment.reference_sync import ReferenceSync, SyncedMixin

Split = Literal["train", "val", "test", "predict"]
ResolvedKind = Literal["cached", "adapter_off", "frozen_adapter", "copy", "fp8"]

SPLITS: dict[TrainerFn, tuple[Split, ...]] = {
    TrainerFn.FITTING: ("train", "val"),
    TrainerFn.VALIDATING: ("val",),
    TrainerFn.TESTING: ("test",),
    TrainerFn.PREDICTING: ("predict",),
}

_PLACE = "place"
CHUNK = 256
"""Groups per batch handed to the reference's precomputation; it cuts them further by tokens."""


class ReferencedMixin(SyncedMixin):
    """PolicyMixin with a reference, built before a checkpoint can move the policy.

    Args:
        reference: kind of reference, see `alignment.reference`. `auto` caches when the run goes over a finite data set
            at least once; a shorter run takes a copy rather than score rows it never sees.
        reference_sync: how the reference follows the policy. None: it stays.
    """

    reference_entropy: bool = False
    """Whether the algorithm compares with the reference's token entropies; set before `configure_model`."""

    def __init__(
        self,
        *,
        policy: PolicyConfig,
        reference: ReferenceKind,
        reference_sync: ReferenceSync | None = None,
        optim: OptimConfig,
        micro_batch_tokens: int | None,
    ) -> None:
        super().__init__(
            policy=policy,
            reference=reference,
            reference_sync=reference_sync,
            optim=optim,
            micro_batch_tokens=micro_batch_tokens,
        )
        self.reference_kind: ReferenceKind = reference

    def build_parts(self) -> None:
        super().build_parts()
        self.make_reference(self._resolved_kind(), entropy=self.reference_entropy)

    def _resolved_kind(self) -> ResolvedKind:
        data = None if self._trainer is None else self._trainer.datamodule  # type: ignore[attr-defined]
        if self.reference_kind == "cached" and follows(data):
            raise UserError("reference: cached needs rows that are all known; with data.follow more arrive: use auto")
        if self.reference_kind != "auto":
            return self.reference_kind
        stays = self.policy_config.lora is None and self.reference_sync is None
        return "cached" if stays and self._trainer is not None and covers_data(self._trainer) else self.cheapest_kind

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        return replace(super().memory_plan(trainer), reference=self._resolved_kind())

    def configure_model(self) -> None:
        super().configure_model()
        if self._trainer is not None:  # once per fit, validate, test or predict: each has rows of its own
            self._precompute(self._trainer)

    def rows_ahead(self) -> Iterator[Group]:
        """The rows of what is being done, before there is a model; none unless all are known then and of the kind that
        this module reads."""
        data, doing = self.trainer.datamodule, self.trainer.state.fn  # type: ignore[attr-defined]
        assert doing is not None
        if is_finite(data) and isinstance(data, HasPurpose) and data.purpose == self.reads:
            for split in SPLITS[doing]:
                yield from data.groups(split)

    def reference_logps(self, batch: GroupBatch) -> Tensor:
        """[C] log-probs under the reference, without gradient; 0 at unscored tokens. A batch that has been through
        `with_reference` holds them."""
        known = batch.tokens.get(REF_LOGPS)
        return self.reference.token_logps(batch) if known is None else known

    def with_reference(self, micro: GroupBatch) -> GroupBatch:
        """The micro-batch with what the reference says of its tokens."""
        return micro.with_tokens(**{REF_LOGPS: self.reference_logps(micro)})

    def referenced(self, batch: GroupBatch) -> GroupBatch:
        """The same for a batch of any size, read in micro-batches: for one that will be read more than once."""
        places = torch.arange(len(batch.completion_ids), device=batch.device)
        found: dict[str, Tensor] = {}
        for micro in self.micro_batches(batch.with_tokens(**{_PLACE: places})):
            told = self.with_reference(micro).tokens
            for name in sorted(told.keys() - micro.tokens.keys()):
                found.setdefault(name, told[name].new_zeros(len(places)))[micro.tokens[_PLACE]] = told[name]
        return batch.with_tokens(**found)

    def _precompute(self, trainer: L.Trainer) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.reference.kind != "cached" or not is_finite(data) or trainer.state.fn not in SPLITS:
            return
        key_parts = {
            "tokenizer": tokenizer_digest(self.tokenizer),
            "precision": str(trainer.precision),
            "path": self.engine.path,
        }
        folder = Path(trainer.default_root_dir) / ".cache" / "reference"
        with trainer.precision_plugin.forward_context():
            batches = chunks(data, SPLITS[trainer.state.fn])
            self.reference.precompute(batches, folder, key_parts, self.micro_batch_tokens)


def chunks(data: FiniteGroups, splits: tuple[Split, ...]) -> Iterator[GroupBatch]:
    """The rows of some splits in batches of at most `CHUNK` groups."""
    for split in splits:
        groups = data.groups(split)
        for start in range(0, len(groups), CHUNK):
            yield GroupBatch.from_groups(groups[start : start + CHUNK])


def covers_data(trainer: L.Trainer) -> bool:
    """Whether a fit goes over its whole finite training set at least once."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not is_finite(data) or trainer.state.fn != TrainerFn.FITTING:
        return False
    if trainer.fast_dev_run or trainer.overfit_batches or trainer.limit_train_batches != 1.0:  # type: ignore[attr-defined]
        return False
    if trainer.max_steps == -1 or not isinstance(data, SizedBatches):
        return True
    return trainer.max_steps * data.batch_size >= len(data.groups("train"))
