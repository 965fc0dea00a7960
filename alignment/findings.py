"""What is not finite, as `alignment.blame` tells it, and what of that shows in a batch without computing anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from alignment.batches import GroupBatch
from alignment.experience import ADVANTAGE, BEFORE, REF_LOGPS
from alignment.rollout import SAMPLER_LOGPS
from alignment.skipped import origin
from alignment.spread import local

PLACES = (
    *("learning rate", "optimizer state", "weight", "buffer", "setting", "data", "layer", "log-prob", "sampler"),
    *("reference", "value", "kl", "reward", "advantage", "loss term", "gradient", "transient"),
)
"""In the order of cause."""

NAMED = 8
"""Most weights, rows or terms that are named one by one."""

_TENSORS = {
    SAMPLER_LOGPS: "sampler",
    "old_logps": "log-prob",
    REF_LOGPS: "reference",
    "values": "value",
    "returns": "advantage",
    "reward": "reward",
    "advantages": "advantage",
    ADVANTAGE: "advantage",
    BEFORE: "advantage",
    **dict.fromkeys(("whole", "kl"), "loss term"),
}
"""First part of the name of a batch's tensor -> place; all others are `data`. What losses know of a whole batch comes
of the policy's log-probs."""
_MAY_LACK = ("reward", "returns")
"""Tensors in which NaN says that there is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One place.

    Args:
        place: one of PLACES. what: of it, as a sentence. rows: what it touches, as `skipped.origin` describes rows;
            empty where every row, or none in particular.
    """

    place: str
    what: str
    rows: list[dict[str, Any]] = field(default_factory=list)


@runtime_checkable
class _Charges(Protocol):
    """A module whose rewards may be charged with a divergence (`alignment.penalised.PenalisedMixin`)."""

    def rollout_kl(self, batch: GroupBatch) -> Tensor: ...


def in_batch(module: nn.Module, batch: GroupBatch) -> Iterator[Finding]:
    """Tensors of the batch: those of rows everywhere, those of tokens where tokens are scored."""
    for name, values in {"weights": batch.weights, **batch.rows}.items():
        bad = _bad(name, values)
        if bad.any():
            yield _of_rows(batch, name, values, bad)
    for name, values in batch.tokens.items():
        bad = _bad(name, values) & batch.scored
        if bad.any():
            yield of_tokens(batch, _place(name), name, values, bad)
    if isinstance(module, _Charges) and REF_LOGPS in batch.tokens and SAMPLER_LOGPS in batch.tokens:
        kl = module.rollout_kl(batch)
        if (bad := ~torch.isfinite(kl) & batch.scored).any():
            yield of_tokens(batch, "kl", "the divergence from the reference", kl, bad)


def _place(name: str) -> str:
    return _TENSORS.get(name.partition("/")[0], "data")


def _bad(name: str, values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return torch.zeros_like(values, dtype=torch.bool)
    return values.isinf() if name.startswith(_MAY_LACK) else ~values.isfinite()


def _of_rows(batch: GroupBatch, name: str, values: Tensor, bad: Tensor) -> Finding:
    rows = bad.nonzero()[:, 0].tolist()
    told = f"{name} is {float(values[rows[0]])} in {len(rows)} of {len(values)} completions"
    if name.startswith(ADVANTAGE) and (flat := _flat_rewards(batch, rows[0])):
        told += f"; {flat}"
    return Finding(place=_place(name), what=told, rows=[origin(batch, row) for row in rows[:NAMED]])


def of_tokens(batch: GroupBatch, place: str, name: str, values: Tensor, bad: Tensor) -> Finding:
    """Of a tensor of tokens [C], where the mask `bad` [C] says."""
    at = bad.nonzero()[:, 0]
    rows = torch.unique(batch.row_of()[at]).tolist()
    told = f"{name} is {float(values[at[0]])} at {len(at)} of {int(batch.scored.sum())} tokens"
    return Finding(place=place, what=told, rows=[origin(batch, row) for row in rows[:NAMED]])


def _flat_rewards(batch: GroupBatch, row: int) -> str:
    """Which rewards are alike for all completions of a row's prompt: what divides by their deviation divides by 0."""
    group = batch.group_of == batch.group_of[row]
    told = []
    for name, values in batch.rows.items():
        known = values[group][~values[group].isnan()]
        if name.startswith("reward/") and len(known) and bool(known.min() == known.max()):
            told.append(f"{name.removeprefix('reward/')} ({float(known[0]):g})")
    return f"rewards with deviation 0 among its completions: {', '.join(told)}" if told else ""


def finite(tensor: Tensor) -> bool:
    """Whether every value is; True for whole numbers."""
    return not tensor.is_floating_point() or bool(torch.isfinite(local(tensor)).all())


def bad_gradients(module: nn.Module) -> str:
    """The parameters whose gradients are not finite, "" for none."""
    bad = [name for name, p in module.named_parameters() if p.grad is not None and not finite(p.grad)]
    more = f" and {len(bad) - NAMED} others" if len(bad) > NAMED else ""
    return f"gradients of {', '.join(bad[:NAMED])}{more}" if bad else ""


def largest_gradient(module: nn.Module) -> tuple[float, str]:
    """(size of the largest value of a gradient, name of its parameter); (0, "") without gradients. Of a sharded model
    what this process holds."""
    grads = [(name, local(p.grad)) for name, p in module.named_parameters() if p.grad is not None]
    return max(((float(g.abs().max()), name) for name, g in grads if g.numel()), default=(0.0, ""))
