"""The loss of a batch computed once more, to find the layer, log-prob, term or gradient that is not finite first.

Where the model is sharded every pass is a collective: ranks go through the same micro-batches and rows, do without a
backward together, and stop together, whoever of them has found something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from alignment import distributed, randomness
from alignment.batches import GroupBatch
from alignment.compiled import uncompiled
from alignment.findings import NAMED, Finding, bad_gradients, finite, of_tokens
from alignment.fusion_profile import HasProfile
from alignment.logprobs import LogProbEngine
from alignment.metrics import Metrics
from alignment.sharding import in_step, is_sharded
from alignment.skipped import Rerun, origin
from alignment.tied_rows import gathering_gradients
from alignment.update import without_ddp_reduction

if TYPE_CHECKING:
    from alignment.training import TrainingMixin

T = TypeVar("T")


@runtime_checkable
class _Compares(Protocol):
    """A module whose loss asks its reference (`alignment.referenced.ReferencedMixin`)."""

    def reference_logps(self, batch: GroupBatch) -> Tensor: ...


@runtime_checkable
class _Scores(Protocol):
    """A module that reads tokens under its policy (`alignment.module.PolicyMixin`)."""

    engine: LogProbEngine


def of_loss(module: TrainingMixin, batch: GroupBatch, rerun: Rerun, *, search: bool) -> Iterator[Finding]:
    """Of the first micro-batch that shows something, on any rank of a sharded model; `search`: also which rows do."""
    _clear(module)
    with _as_in_training(module):
        for micro in module.micro_batches(batch, keep_groups=rerun.keep_groups):
            found = list(_micro(module, micro, rerun))
            if _any(module, bool(found)):
                rows = _rows_of(module, micro, rerun) if _any(module, search and bool(found)) else []
                yield from (replace(f, rows=f.rows or rows) for f in found)
                return
    if told := bad_gradients(module):
        yield Finding(place="gradient", what=f"the sum over micro-batches overflows: {told}")


def of_rollout(module: TrainingMixin, batch: GroupBatch) -> Iterator[Finding]:
    """After a rollout: the policy's pass over it once more, without gradient."""
    with _as_in_training(module), torch.no_grad():
        for micro in module.micro_batches(batch, keep_groups=False):
            with _listening(module) as heard:
                found = list(_log_probs(module, micro))
            if heard.output:
                yield Finding(place="layer", what=f"the output of {heard.output}")
            yield from found
            if _any(module, bool(heard.output or found)):
                return


def _any(module: nn.Module, flag: bool) -> bool:
    """The flag; of a sharded model whether it is set on any rank."""
    return distributed.any_rank(flag, next(module.parameters()).device) if is_sharded(module) else flag


def _together(module: nn.Module, compute: Callable[[], T]) -> T:
    """What it returns. An error of code that meets what is not a number ends the search, on every rank of a sharded
    model: the others would wait."""
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(compute())
    except Exception as raised:
        error = raised
    if _any(module, error is not None):
        raise error or RuntimeError("another rank's search ended")
    return results[0]


def _clear(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = None


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


def _loss(module: TrainingMixin, micro: GroupBatch, rerun: Rerun) -> tuple[Tensor, Metrics, bool]:
    """(this micro-batch's share of the loss, its metrics, whether the loss is finite). Where it is, on every rank of a
    sharded model, its gradient is in `.grad`."""
    part, metrics = _together(module, lambda: rerun.loss(micro, rerun.counts))
    good = finite(part.detach())
    if not _any(module, not good) and part.requires_grad:
        module.manual_backward(part)
    return part.detach(), metrics, good


def _micro(module: TrainingMixin, micro: GroupBatch, rerun: Rerun) -> Iterator[Finding]:
    with _listening(module) as heard:
        part, metrics, good = _loss(module, micro, rerun)
    if heard.output:
        yield Finding(place="layer", what=f"the output of {heard.output}")
    if _any(module, not good):
        found = list(_log_probs(module, micro))
        if not good:
            yield from found
            terms = [name for name, (total, _) in metrics.items() if not finite(total)]
            told = ", ".join(terms[:NAMED])
            yield Finding(place="loss term", what=f"{told or 'the loss'} ({float(part)})")
        return
    named = _any(module, bool(heard.gradient))
    if heard.gradient:
        yield Finding(place="gradient", what=f"first that of {heard.gradient}")
    elif not named and (told := bad_gradients(module)):
        yield Finding(place="gradient", what=told)


def _log_probs(module: TrainingMixin, micro: GroupBatch) -> Iterator[Finding]:
    """Token log-probs of policy and reference."""
    with torch.no_grad():
        if isinstance(module, _Scores) and module.engine.has_head:
            logps = module.engine(micro).logps
            assert logps is not None
            if (bad := ~torch.isfinite(logps) & micro.scored).any():
                yield of_tokens(micro, "log-prob", "log-prob under the policy", logps, bad)
        if isinstance(module, _Compares):
            logps = module.reference_logps(micro)
            if (bad := ~torch.isfinite(logps) & micro.scored).any():
                yield of_tokens(micro, "reference", "log-prob under the reference", logps, bad)


def _rows_of(module: TrainingMixin, micro: GroupBatch, rerun: Rerun) -> list[dict[str, Any]]:
    """The groups whose own loss or gradient is not finite, as their first completions; empty when all are, and where a
    loss does not take a group alone. Gradients of a sharded model are sums over ranks: which rank's row it was, the
    outputs' gradients tell."""
    bad = []
    cut = is_sharded(module)
    for alone in in_step(module, (micro.select_groups([group]) for group in range(micro.num_prompts)), micro):
        _clear(module)
        listening: AbstractContextManager[_Heard] = _listening(module) if cut else nullcontext(_Heard())
        try:
            with listening as heard:
                _, _, good = _loss(module, alone, rerun)
        except Exception:  # of a user's loss that needs other prompts: what was found before it is worth more
            return []
        if not good or heard.gradient or (not cut and bad_gradients(module)):
            bad.append(alone)
    if len(bad) == micro.num_prompts > 1:
        return []
    return [origin(alone, 0) for alone in bad[:NAMED] if alone.num_completions]


# ---------------------------------------------------------------------- hooks


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
