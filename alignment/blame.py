"""Why an update is not finite: the first place on the way from the data to the gradient that is not.

place             looked for in
learning rate     the optimizer's groups
optimizer state   what the optimizer remembers of each parameter
weight, buffer    the module
setting           values that move: beta, coefficients (`alignment.schedulable`); decay and betas of the optimizer
data              weights and named numbers of the batch's rows, a margin for one
layer             outputs of every module, in the order they are computed, when the loss is computed once more
log-prob          token log-probs of the policy, then or after the rollout
sampler           log-probs that came with the completions
reference         the reference's log-probs
value             the critic's values after the rollout
kl                the divergence that a reward is charged with
reward            an infinite reward (NaN is an abstention)
advantage         what came of the rewards, with those that do not differ among the completions of the row
loss term         parts of the loss that a module reports, and the loss of a micro-batch
gradient          of module outputs and of parameters, in the order of the backward pass; a norm too large to square
transient         none of these: the same batch gives finite numbers when its loss is computed again

Nothing here updates anything: gradients are cleared afterwards, random state is as it was. It costs a few passes over
one batch, and happens only when an update is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from alignment import distributed, once_more
from alignment.findings import NAMED, PLACES, Finding, bad_gradients, finite, in_batch, largest_gradient
from alignment.guard import LARGEST_NORM, SETTING
from alignment.moments import nonfinite_state
from alignment.sharded_strategy import ShardedStrategy
from alignment.sharding import is_sharded
from alignment.skipped import Skipped
from alignment.spread import is_spread, local, place_of
from alignment.update import optimizer_of

if TYPE_CHECKING:
    from alignment.training import TrainingMixin


# ---------------------------------------------------------------------- all ranks


def blame(module: TrainingMixin, skipped: Skipped, *, rerun: bool = True) -> dict[str, Any]:
    """The first place of all ranks: `place`, `rank` and `ranks` that have found something, `rows`, `text`, and `chain`:
    all that was found, by rank. A collective. Processes that are one rank (`alignment.distributed`) count each by
    itself here: each holds weights of its own.

    Args:
        rerun: compute the loss once more to find layers, terms and gradients.
    """
    left = bad_gradients(module)
    top = largest_gradient(module) if not left and skipped.grad_norm > LARGEST_NORM else (0.0, "")
    can = rerun and isinstance(module.trainer.strategy, SingleDeviceStrategy | DDPStrategy | ShardedStrategy)
    found: list[Finding] = []
    try:
        # What is looked at alone may fail alone: only then begins what ranks of a sharded model do together.
        _collect(found, investigate(module, skipped))
        if can:
            held = any(f.place in ("weight", "buffer", "setting") for f in found)
            _collect(found, _computed(module, skipped, search=not held))
    finally:
        for p in module.parameters():
            p.grad = None
    told: list[Any] = distributed.gather_from_processes(([asdict(each) for each in found], left, top))
    parts = [part for part, _, _ in told]
    if not any(parts):
        searched = can and skipped.rerun is not None
        rank, last = _nothing([own for _, own, _ in told], [own for _, _, own in told], searched=searched)
        parts[rank] = [asdict(last)]
    return _joined(parts)


def _collect(found: list[Finding], search: Iterator[Finding]) -> None:
    """What is known stays known when the search ends early."""
    try:
        for finding in search:
            found.append(finding)
    except Exception as error:  # of code that meets what is not a number; other ranks wait for what this one found
        found.append(Finding(place="transient", what=f"the search ended with {type(error).__name__}: {error}"))


def _computed(module: TrainingMixin, skipped: Skipped, *, search: bool) -> Iterator[Finding]:
    """By passes over the batch, which a rank without rows takes part in only where they are collectives."""
    if not skipped.batch.num_prompts and not is_sharded(module):
        return
    if skipped.rerun is not None:
        yield from once_more.of_loss(module, skipped.batch, skipped.rerun, search=search)
    else:
        yield from once_more.of_rollout(module, skipped.batch)


def _nothing(left: Sequence[str], sizes: Sequence[tuple[float, str]], *, searched: bool) -> tuple[int, Finding]:
    """(rank, finding) where no rank found anything.

    Args:
        left: by rank, the gradients that are not finite as the update left them.
        sizes: by rank, the largest value of a gradient and its parameter, where all are finite and their norm is not.
    """
    rank = next((rank for rank, names in enumerate(left) if names), 0)
    top = max(range(len(sizes)), key=lambda rank: sizes[rank][0])
    if not left[rank] and sizes[top][1]:
        size, name = sizes[top]
        what = f"each value is finite, and the square of their norm is not: the largest is {size:.3g}, of {name}"
        return top, Finding(place="gradient", what=what)
    if searched:
        what = "computed again the same batch gives finite numbers (memory at fault, or something random)"
        what += f"; before it had {left[rank]}" if left[rank] else ""
        return rank, Finding(place="transient", what=what)
    return rank, Finding(place="gradient", what=left[rank] or "not looked for: the loss was not computed again")


def _joined(parts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    every = [(PLACES.index(f["place"]), rank, i) for rank, part in enumerate(parts) for i, f in enumerate(part)]
    place, rank, i = min(every)
    first = parts[rank][i]
    ranks = sorted({r for p, r, _ in every if p == place})
    text = f"{first['place']}: {first['what']}"
    if first["rows"]:
        rows = [f"{row['row']} (completion {row['completion']})" for row in first["rows"]]
        text += f"; row {', '.join(rows)}"
    if len(parts) > 1:
        text += f"; on rank {', '.join(map(str, ranks))}"
    chain = {str(r): [f"{f['place']}: {f['what']}" for f in part] for r, part in enumerate(parts)}
    return {"place": first["place"], "rank": rank, "ranks": ranks, "rows": first["rows"], "text": text, "chain": chain}


# ---------------------------------------------------------------------- this rank


def investigate(module: TrainingMixin, skipped: Skipped) -> Iterator[Finding]:
    """What is not finite on this rank without computing anything, in the order of cause."""
    yield from _optimizer(module, skipped.unsafe)
    yield from _held(module)
    yield from _settings(module)
    yield from sorted(in_batch(module, skipped.batch), key=lambda finding: PLACES.index(finding.place))


def _optimizer(module: TrainingMixin, unsafe: str) -> Iterator[Finding]:
    optimizer, trained = optimizer_of(module)
    if unsafe.startswith(SETTING):
        yield Finding(place="setting", what=unsafe.removeprefix(SETTING))
    if unsafe.startswith("learning rate"):
        yield Finding(place="learning rate", what=unsafe)
    if (found := nonfinite_state(optimizer.optimizer)) is not None:
        place, key = found
        names = {id(p): name for name, p in module.named_parameters()}
        yield Finding(place="optimizer state", what=f"{key} of {names[id(trained[place])]} is not finite")


def _held(module: nn.Module) -> Iterator[Finding]:
    """Weights and buffers."""
    for place, named in (("weight", module.named_parameters()), ("buffer", module.named_buffers())):
        bad = [(name, tensor) for name, tensor in named if not finite(tensor)]
        for name, tensor in bad[:NAMED]:
            values = local(tensor.detach())
            at = (~torch.isfinite(values)).nonzero()
            first = tuple(at[0].tolist())
            begin = place_of(tensor)[1] if is_spread(tensor) else (0,) * len(first)
            where = [i + o for i, o in zip(first, begin, strict=True)]
            told = f"{name} is {float(values[first])} at {where} ({len(at):,} of {values.numel():,} values)"
            yield Finding(place=place, what=told + (f", and {len(bad) - 1} others are not finite" if bad[1:] else ""))


def _settings(module: TrainingMixin) -> Iterator[Finding]:
    for name in module.schedulables:
        value = module.schedulables[name].value
        if isinstance(value, int | float) and not math.isfinite(value):
            yield Finding(place="setting", what=f"{name} is {value}")
