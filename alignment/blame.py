"""Why an update is not finite: the first place on the way from the data to the gradient that is not.

place             looked for in
learning rate     the optimizer's groups
optimizer state   what the optimizer remembers of each parameter
weight, buffer    the module
setting           values that move: beta, coefficients (`alignment.schedulable`)
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
gradient          gradients of module outputs and of parameters, in the order of the backward pass
transient         none of these: the same batch gives finite numbers when its loss is computed again

Nothing here updates anything: gradients are cleared afterwards, random state is as it was. It costs a few passes over
one batch, and happens only when an update is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from alignment import distributed, randomness
from alignment.batches import GroupBatch
from alignment.compiled import uncompiled
from alignment.experience import ADVANTAGE, BEFORE, REF_LOGPS
from alignment.fusion_profile import HasProfile
from alignment.logprobs import LogProbEngine
from alignment.moments import nonfinite_state
from alignment.rollout import SAMPLER_LOGPS
from alignment.skipped import Rerun, Skipped, origin
from alignment.spread import local
from alignment.tied_rows import gathering_gradients
from alignment.update import optimizer_of, without_ddp_reduction

if TYPE_CHECKING:
    from alignment.training import TrainingMixin

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
class _Compares(Protocol):
    """A module whose loss asks its reference (`alignment.referenced.ReferencedMixin`)."""

    def reference_logps(self, batch: GroupBatch) -> Tensor: ...


@runtime_checkable
class _Charges(Protocol):
    """A module whose rewards may be charged with a divergence (`alignment.penalised.PenalisedMixin`)."""

    def rollout_kl(self, batch: GroupBatch) -> Tensor: ...


@runtime_checkable
class _Scores(Protocol):
    """A module that reads tokens under its policy (`alignment.module.PolicyMixin`)."""

    engine: LogProbEngine


# ---------------------------------------------------------------------- all ranks


def blame(module: TrainingMixin, skipped: Skipped, *, rerun: bool = True) -> dict[str, Any]:
    """The first place of all ranks: `place`, `rank` and `ranks` that have found something, `rows`, `text`, and `chain`:
    all that was found, by rank. A collective.

    Args:
        rerun: compute the loss once more to find layers, terms and gradients. It is not where the model is sharded:
            ranks would have to compute alike, and those without a fault have nothing to look for.
    """
    before = _gradients(module)
    can = isinstance(module.trainer.strategy, SingleDeviceStrategy | DDPStrategy)
    found: list[Finding] = []
    try:
        for finding in investigate(module, skipped, rerun=rerun and can):
            found.append(finding)  # what is known stays known when the search ends early
    except (RuntimeError, ValueError) as error:  # of code that meets what is not a number
        found.append(Finding(place="transient", what=f"the search ended with {type(error).__name__}: {error}"))
    finally:
        for p in module.parameters():
            p.grad = None
    parts: list[Any] = distributed.all_gather_objects([asdict(each) for each in found])
    if not any(parts):
        parts[0] = [asdict(_nothing(before, searched=rerun and can and skipped.rerun is not None))]
    return _joined(parts)


def _nothing(gradients: str, *, searched: bool) -> Finding:
    """Where no rank found anything; `gradients`: those that the update itself left behind."""
    if searched:
        what = "computed again the same batch gives finite numbers (memory at fault, or something random)"
        return Finding(place="transient", what=f"{what}; before it had {gradients}" if gradients else what)
    return Finding(place="gradient", what=gradients or "not looked for: the loss was not computed again")


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


def investigate(module: TrainingMixin, skipped: Skipped, *, rerun: bool) -> Iterator[Finding]:
    """What is not finite on this rank, in the order of cause."""
    batch = skipped.batch
    yield from _optimizer(module, skipped.unsafe)
    held = [*_held(module), *_settings(module)]
    yield from held
    yield from sorted(_batch(module, batch), key=lambda finding: PLACES.index(finding.place))
    if not rerun or not batch.num_prompts:
        return
    if skipped.rerun is not None:
        yield from _again(module, batch, skipped.rerun, search=not held)
    else:
        yield from _policy(module, batch)


def _optimizer(module: TrainingMixin, unsafe: str) -> Iterator[Finding]:
    optimizer, trained = optimizer_of(module)
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
            told = f"{name} is {float(values[first])} at {list(first)} ({len(at):,} of {values.numel():,} values)"
            yield Finding(place=place, what=told + (f", and {len(bad) - 1} others are not finite" if bad[1:] else ""))


def _settings(module: TrainingMixin) -> Iterator[Finding]:
    for name in module.schedulables:
        value = module.schedulables[name].value
        if isinstance(value, int | float) and not math.isfinite(value):
            yield Finding(place="setting", what=f"{name} is {value}")


# ---------------------------------------------------------------------- the batch


def _batch(module: TrainingMixin, batch: GroupBatch) -> Iterator[Finding]:
    """Tensors of the batch: those of rows everywhere, those of tokens where tokens are scored."""
    for name, values in {"weights": batch.weights, **batch.rows}.items():
        bad = _bad(name, values)
        if bad.any():
            yield _of_rows(batch, name, values, bad)
    for name, values in batch.tokens.items():
        bad = _bad(name, values) & batch.scored
        if bad.any():
            yield _of_tokens(batch, _place(name), name, values, bad)
    if isinstance(module, _Charges) and REF_LOGPS in batch.tokens and SAMPLER_LOGPS in batch.tokens:
        kl = module.rollout_kl(batch)
        if (bad := ~torch.isfinite(kl) & batch.scored).any():
            yield _of_tokens(batch, "kl", "the divergence from the reference", kl, bad)


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


def _of_tokens(batch: GroupBatch, place: str, name: str, values: Tensor, bad: Tensor) -> Finding:
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


# ---------------------------------------------------------------------- the loss once more


def _again(module: TrainingMixin, batch: GroupBatch, rerun: Rerun, *, search: bool) -> Iterator[Finding]:
    """Of the first micro-batch that shows something; `search`: also which rows do."""
    for p in module.parameters():
        p.grad = None
    with _as_in_training(module):
        for micro in batch.split(module.micro_batch_tokens, keep_groups=rerun.keep_groups):
            found = list(_micro(module, micro, rerun))
            if found:
                rows = _rows_of(module, micro, rerun) if search else []
                yield from (replace(f, rows=f.rows or rows) for f in found)
                return
    if told := _gradients(module):
        yield Finding(place="gradient", what=f"the sum over micro-batches overflows: {told}")


@contextmanager
def _as_in_training(module: TrainingMixin) -> Iterator[None]:
    """What an update's loss is computed under; random state and what modules note are afterwards as they were."""
    profile = module.profile if isinstance(module, HasProfile) else None
    with ExitStack() as stack:
        cuda = [torch.cuda.current_device()] if module.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        for context in (without_ddp_reduction(module), gathering_gradients(), uncompiled(module)):
            stack.enter_context(context)
        if isinstance(module, HasProfile):
            module.profile = None
        torch.manual_seed(randomness.derive(module.seed, "batch", module.batches_seen, distributed.rank()))
        try:
            yield
        finally:
            if isinstance(module, HasProfile):
                module.profile = profile


def _micro(module: TrainingMixin, micro: GroupBatch, rerun: Rerun) -> Iterator[Finding]:
    with _listening(module) as heard:
        part, metrics = rerun.loss(micro, rerun.counts)
        good = finite(part.detach())
        if good and part.requires_grad:
            module.manual_backward(part)
    if heard.output:
        yield Finding(place="layer", what=f"the output of {heard.output}")
    if not good:
        yield from _log_probs(module, micro)
        terms = [name for name, (total, _) in metrics.items() if not finite(total)]
        told = ", ".join(terms[:NAMED])
        yield Finding(place="loss term", what=f"{told or 'the loss'} ({float(part.detach())})")
        return
    if heard.gradient:
        yield Finding(place="gradient", what=f"first that of {heard.gradient}")
    elif told := _gradients(module):
        yield Finding(place="gradient", what=told)


def _policy(module: TrainingMixin, batch: GroupBatch) -> Iterator[Finding]:
    """After a rollout: the policy's pass over it once more, without gradient."""
    with _as_in_training(module), torch.no_grad():
        for micro in batch.split(module.micro_batch_tokens, keep_groups=False):
            with _listening(module) as heard:
                found = list(_log_probs(module, micro))
            if heard.output:
                yield Finding(place="layer", what=f"the output of {heard.output}")
            yield from found
            if heard.output or found:
                return


def _log_probs(module: TrainingMixin, micro: GroupBatch) -> Iterator[Finding]:
    """Token log-probs of policy and reference."""
    with torch.no_grad():
        if isinstance(module, _Scores) and module.engine.has_head:
            logps = module.engine(micro).logps
            assert logps is not None
            if (bad := ~torch.isfinite(logps) & micro.scored).any():
                yield _of_tokens(micro, "log-prob", "log-prob under the policy", logps, bad)
        if isinstance(module, _Compares):
            logps = module.reference_logps(micro)
            if (bad := ~torch.isfinite(logps) & micro.scored).any():
                yield _of_tokens(micro, "reference", "log-prob under the reference", logps, bad)


def _rows_of(module: TrainingMixin, micro: GroupBatch, rerun: Rerun) -> list[dict[str, Any]]:
    """The groups whose own loss or gradient is not finite, as their first completions; empty when all are."""
    bad = []
    for group in range(micro.num_prompts):
        alone = micro.select_groups([group])
        for p in module.parameters():
            p.grad = None
        part, _ = rerun.loss(alone, rerun.counts)
        if finite(part.detach()) and part.requires_grad:
            module.manual_backward(part)
        if not finite(part.detach()) or _gradients(module):
            bad.append(alone)
    if len(bad) == micro.num_prompts > 1:
        return []
    return [origin(alone, 0) for alone in bad[:NAMED] if alone.num_completions]


@dataclass
class _Heard:
    """Names of the first output and of the first gradient that are not finite; "" while there is none."""

    output: str = ""
    gradient: str = ""


@contextmanager
def _listening(module: nn.Module) -> Iterator[_Heard]:
    heard = _Heard()
    handles = [m.register_forward_hook(_output_hook(heard, name)) for name, m in module.named_modules() if name]
    handles += [
        p.register_hook(_gradient_hook(heard, f"parameter {name}"))  # type: ignore[no-untyped-call]
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _output_hook(heard: _Heard, name: str) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            heard.output = heard.output or ("" if finite(tensor.detach()) else name)
            if tensor.requires_grad:
                tensor.register_hook(_gradient_hook(heard, f"the output of {name}"))  # type: ignore[no-untyped-call]

    return hook


def _gradient_hook(heard: _Heard, name: str) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        heard.gradient = heard.gradient or ("" if finite(gradient) else name)

    return hook


# ---------------------------------------------------------------------- utilities


def finite(tensor: Tensor) -> bool:
    """Whether every value is; True for whole numbers."""
    return not tensor.is_floating_point() or bool(torch.isfinite(local(tensor)).all())


def _gradients(module: nn.Module) -> str:
    """The parameters whose gradients are not finite, "" for none."""
    bad = [name for name, p in module.named_parameters() if p.grad is not None and not finite(p.grad)]
    more = f" and {len(bad) - NAMED} others" if len(bad) > NAMED else ""
    return f"gradients of {', '.join(bad[:NAMED])}{more}" if bad else ""


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
