"""An update that is left out, as callbacks that want to know why see it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """How an update computed its loss, to do it once more.

    Args:
        loss: (micro-batch, counts of the whole batch) -> (its share of the loss [], metrics).
        counts: of the whole batch. keep_groups: see `GroupBatch.split`.
    """

    loss: Callable[[GroupBatch, Any], tuple[Tensor, Metrics]]
    counts: Any
    keep_groups: bool

    @classmethod
    def of_parts(
        cls, parts_fn: Callable[..., tuple[Mapping[str, Tensor], Metrics]], counts: Any, keep_groups: bool
    ) -> Rerun:
        """Of an update whose loss is a sum: name -> share of that part. Each is a metric too, `part/NAME`."""

        def loss(micro: GroupBatch, counts: Any) -> tuple[Tensor, Metrics]:
            parts, metrics = parts_fn(micro, counts)
            one = torch.ones((), dtype=torch.float64)
            named = {f"part/{name.removeprefix('/')}": (part.detach(), one) for name, part in parts.items()}
            return torch.stack([*parts.values()]).sum(), {**metrics, **named}

        return cls(loss=loss, counts=counts, keep_groups=keep_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What is known of it.

    Args:
        batch: this rank's part.
        loss, grad_norm: over all ranks; NaN for a rollout that is left out before any update.
        unsafe: what on this rank would make a step damage weights (`FiniteGuard.unsafe`); "" for nothing.
        rerun: how the loss is computed; None for a rollout that is left out before any update.
        folder: where the batch is dumped.
    """

    batch: GroupBatch
    loss: float
    grad_norm: float
    unsafe: str
    rerun: Rerun | None
    folder: Path


@runtime_checkable
class SkipListener(Protocol):
    """A callback that is told of every update that is left out for want of finite numbers."""

    def on_nonfinite(self, trainer: L.Trainer, module: L.LightningModule, skipped: Skipped) -> dict[str, Any]:
        """Facts for the dump, with the key `text`: a sentence. A collective: every rank calls it, while gradients are
        as the update left them; it may use and clear them."""
        ...


def origin(batch: GroupBatch, completion: int) -> dict[str, Any]:
    """Where a completion comes from: the `row` of the data set (-1 for one without a number), which `completion` of
    that row, and the row's `columns`, long values cut."""
    group = int(batch.group_of[completion])
    first = int((batch.group_of == group).nonzero()[0, 0])
    columns = batch.columns[group] if batch.columns else {}
    return {
        "row": int(batch.group_index[group]),
        "completion": completion - first,
        "columns": {name: textwrap.shorten(str(value), 200) for name, value in columns.items()},
    }
