"""The one update every module makes: split, backward, reduce over ranks, agree on finiteness, clip, step.

A batch is an optimisation batch. Each micro-batch returns its *share* of the loss, already divided by the counts of the
whole batch over all ranks, so gradients are summed and never averaged: neither `micro_batch_tokens` nor the number of
ranks appears in the result. Ranks may have different numbers of micro-batches, or no rows at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.folders import run_folder
from alignment.guard import LARGEST_NORM, TrainingDivergedError, dump_batch, roll_back
from alignment.metrics import Metrics, add_metrics
from alignment.protocols import GradientListener
from alignment.sharding import is_sharded
from alignment.skipped import Rerun, SkipListener, Skipped
from alignment.spread import is_spread, is_twin, local, own_share
from alignment.tied_rows import gathering_gradients

if TYPE_CHECKING:
    from alignment.training import TrainingMixin

log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Denominators of a batch, known from its masks before any forward. Whole numbers while every weight is 1.

    Args:
        prompts: sum over groups of the smallest weight among the group's completions, where a completion without a
            scored token weighs 0: the number of complete preference pairs, for example.
        rows: sum of the weights of completions with at least one scored token.
        tokens: sum over scored tokens of their completion's weight.
    """

    prompts: float
    rows: float
    tokens: float

    @classmethod
    def of(cls, batch: GroupBatch) -> Counts:
        """Of this batch over all ranks. A collective: every rank calls it, also with an empty batch."""
        weights = row_weights(batch)
        tokens = (weights.double() * batch.scored_lengths()).sum()
        local = torch.stack([group_weights(batch).double().sum(), weights.double().sum(), tokens])
        prompts, rows, count = distributed.all_reduce_sum(local).tolist()
        return cls(prompts=prompts, rows=rows, tokens=count)


UNIT = Counts(prompts=1.0, rows=1.0, tokens=1.0)
"""Counts under which a loss function returns plain sums: evaluation uses it and keeps only the metrics."""

LossFn = Callable[[GroupBatch, Counts], tuple[Tensor, Metrics]]
"""loss_fn(micro-batch, counts of the whole batch) -> (share of the loss [], metrics of this micro-batch)."""


def row_weights(batch: GroupBatch) -> Tensor:
    """[N] weight of each completion; 0 for one without a scored token."""
    return torch.where(batch.scored_lengths() > 0, batch.weights, torch.zeros_like(batch.weights))


def group_weights(batch: GroupBatch) -> Tensor:
    """[P] smallest row weight in each group: 0 as soon as one completion has nothing to score; 0 for no completion."""
    start = torch.full((batch.num_prompts,), math.inf, dtype=batch.weights.dtype, device=batch.device)
    least = start.scatter_reduce(0, batch.group_of, row_weights(batch), reduce="amin")
    return torch.where(torch.isinf(least), torch.zeros_like(least), least)


def reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """SUM gradients over ranks, in flat buckets of at most 64 MiB.

    A gradient missing on this rank counts as zeros; one missing on every rank stays None, so that an optimizer treats
    it as one process would. Every rank must hold the same parameters in the same order. Those of sharded parameters
    have been summed when they were cut, in the backward pass. Processes that are one rank have computed the same, but
    for what a device adds up in no fixed order; they get their mean, so that their weights stay the same.
    """
    if distributed.twins() > 1:
        shared = [local(p.grad) for p in parameters if p.grad is not None and is_spread(p) and is_twin(p)]
        _in_buckets(shared, _mean_over_twins)
    parameters = [p for p in parameters if not is_spread(p)]
    if distributed.processes() == 1 or not parameters:
        return
    device = parameters[0].device
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
    counts = distributed.sum_over_processes(present).tolist()
    used: list[Tensor] = []
    for p in (p for p, n in zip(parameters, counts, strict=True) if n > 0):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        used.append(p.grad)
    _in_buckets(used, _sum_over_ranks)


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm of all gradients together [], in fp32 or better: torch's own gives it in the gradients' dtype, and bf16
    has three digits. A collective where gradients are spread over ranks."""
    norms = [torch.linalg.vector_norm(local(g), dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads]
    stacked = torch.stack([n.to(norms[0].device) for n in norms])
    shares = [own_share(g) if is_spread(g) else 0.0 for g in grads]  # 0: this process holds all of it
    if not any(shares):
        total: Tensor = torch.linalg.vector_norm(stacked)
        return total
    squares, share = stacked.double().square(), torch.tensor(shares, dtype=torch.float64, device=stacked.device)
    parts = distributed.sum_over_processes((squares * share)[share > 0].sum())
    return (parts + squares[share == 0].sum()).sqrt().to(stacked.dtype)


def _sum_over_ranks(flat: Tensor) -> None:
    dist.all_reduce(flat)
    if distributed.twins() > 1:
        flat.div_(distributed.twins())


def _mean_over_twins(flat: Tensor) -> None:
    distributed.sum_over_twins_(flat)
    flat.div_(distributed.twins())


def _in_buckets(grads: Iterable[Tensor], reduce: Callable[[Tensor], None]) -> None:
    """`reduce` in place, of flat copies of at most 64 MiB of these tensors at a time."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        nbytes = grad.numel() * grad.element_size()
        if bucket and (size + nbytes > BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            _reduce_bucket(bucket, reduce)
            bucket, size = [], 0
        bucket.append(grad)
        size += nbytes
    if bucket:
        _reduce_bucket(bucket, reduce)


def _reduce_bucket(grads: Sequence[Tensor], reduce: Callable[[Tensor], None]) -> None:
    flat = torch.cat([g.flatten() for g in grads])
    reduce(flat)
    for g, part in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))


def accumulate(
    module: TrainingMixin, batch: GroupBatch, loss_fn: LossFn, keep_groups: bool, counts: Counts
) -> tuple[Tensor, Metrics]:
    """Backward of every micro-batch into `.grad`. Returns this rank's share of the loss (float64) and its metrics."""
    module.note_batch_size(counts.prompts)
    loss = torch.zeros((), dtype=torch.float64, device=module.device)
    metrics: Metrics = {}
    with without_ddp_reduction(module), gathering_gradients():
        for micro in module.micro_batches(batch, keep_groups=keep_groups):
            part, part_metrics = loss_fn(micro, counts)
            if has_gradient(part, micro):
                module.manual_backward(part)
            elif is_sharded(module):
                raise ValueError("the loss of an empty micro-batch has no gradient, and other ranks wait for it")
            loss += part.detach().double()
            add_metrics(metrics, part_metrics)
    return loss, metrics


def has_gradient(part: Tensor, micro: GroupBatch) -> bool:
    """Whether there is something to go back through. Raises ValueError when there is not and there should be."""
    if not part.requires_grad and bool(row_weights(micro).sum() > 0):
        raise ValueError("the loss of a micro-batch with completions to train on has no gradient")
    return part.requires_grad


def without_ddp_reduction(module: TrainingMixin) -> AbstractContextManager[None]:
    """DDP would average, and wait for ranks that have fewer micro-batches: gradients are reduced explicitly instead."""
    strategy = module.trainer.strategy
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()


def optimizer_of(module: TrainingMixin) -> tuple[LightningOptimizer, list[nn.Parameter]]:
    """The module's optimizer and everything it trains, in its order."""
    optimizer = module.optimizers()
    assert isinstance(optimizer, LightningOptimizer), "modules have exactly one optimizer"
    return optimizer, [p for group in optimizer.param_groups for p in group["params"]]


def update(
    module: TrainingMixin,
    batch: GroupBatch,
    loss_fn: LossFn,
    *,
    keep_groups: bool = True,
    counts: Counts | None = None,
) -> None:
    """One optimizer step from one batch, or a skipped step when loss or gradient is not finite on any rank.

    `counts` None: those of the batch. They are given when rows whose loss and gradient are 0 have been left out.

    Skipping leaves parameters, moments, schedule and `global_step` untouched. Raises TrainingDivergedError after three
    skips in a row, or more than five in 500 updates (`guard.Limits`), if going back has not helped already.
    """
    optimizer, parameters = optimizer_of(module)
    optimizer.zero_grad()
    counts = Counts.of(batch) if counts is None else counts
    share, metrics = accumulate(module, batch, loss_fn, keep_groups, counts)
    reduce_gradients(parameters)
    step(module, batch, share, metrics, rerun=Rerun(loss=loss_fn, counts=counts, keep_groups=keep_groups))


def step(
    module: TrainingMixin,
    batch: GroupBatch,
    share: Tensor,
    metrics: Metrics,
    norms: Mapping[str, float] | None = None,
    rerun: Rerun | None = None,
) -> None:
    """The second half of `update`: from gradients in `.grad`, which are sums over ranks, to weights.

    Args:
        share: this rank's share of the loss, float64. metrics: of this rank.
        norms: name -> L2 norm of a part of the gradient, for `GradientListener`.
        rerun: how the loss was computed, for a callback that wants to know why it is not finite.
    """
    optimizer, parameters = optimizer_of(module)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads) if grads else torch.zeros((), device=module.device)
    unsafe = module.guard.unsafe(optimizer.optimizer)
    # Loss and gradients are sums over ranks, so every rank sees the same values and takes the same branch. What makes
    # a step unsafe may be known in one process alone: it goes with the loss.
    own = torch.stack([share / distributed.twins(), torch.full_like(share, float(bool(unsafe)))])
    loss, unsafe_processes, total = torch.cat([distributed.sum_over_processes(own), norm.double()[None]]).tolist()
    finite = math.isfinite(loss) and math.isfinite(total) and not total > LARGEST_NORM and unsafe_processes == 0
    lr = float(optimizer.param_groups[0]["lr"])
    if finite:
        seen = {**(norms or {}), **module.part_norms(), "total": total}
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientListener):
                callback.on_gradients(module.trainer, module, seen)
    told = None if finite else _explain(module, batch, loss, total, unsafe, rerun)
    if finite and module.finish_gradients(parameters, norm):
        optimizer.step()
        module.guard.moments.stepped(optimizer.optimizer)
        module.step_schedule()
    else:
        optimizer.zero_grad()
    module.note_update(loss=loss, grad_norm=total, lr=lr, metrics=metrics)
    _count(module, told)


def leave_out(module: TrainingMixin, batch: GroupBatch) -> None:
    """Count a rollout whose numbers are not finite, on any rank, as an update that was not: it has none. Every rank
    calls it."""
    optimizer, _ = optimizer_of(module)
    told = _explain(module, batch, math.nan, math.nan, "", None)
    module.note_update(loss=math.nan, grad_norm=math.nan, lr=float(optimizer.param_groups[0]["lr"]), metrics={})
    _count(module, told)


def _explain(
    module: TrainingMixin, batch: GroupBatch, loss: float, norm: float, unsafe: str, rerun: Rerun | None
) -> str:
    """Dump the batch, with what callbacks find out about it. Returns what to say of it."""
    trainer = module.trainer
    facts = {"batch": module.batches_seen, "global_step": trainer.global_step, "loss": loss, "grad_norm": norm}
    folder = run_folder(trainer) / "nonfinite" / f"batch-{module.batches_seen}"
    skipped = Skipped(batch=batch, loss=loss, grad_norm=norm, unsafe=unsafe, rerun=rerun, folder=folder)
    listeners = [c for c in trainer.callbacks if isinstance(c, SkipListener)]  # type: ignore[attr-defined]
    found = [listener.on_nonfinite(trainer, module, skipped) for listener in listeners]
    for more in found:
        facts |= more
    dump_batch(batch, folder, facts)
    if distributed.process() == 0 and not found:
        why = f"; {unsafe}" if unsafe else ""
        log.warning("update skipped: loss %s, gradient norm %s%s; the batch is in %s", loss, norm, why, folder)
    return "; ".join([f"the batch is in {folder}", *(str(more["text"]) for more in found)])


def _count(module: TrainingMixin, told: str | None) -> None:
    """Count an update, `told` None for a finite one. Go back, or stop, where there were too many."""
    guard = module.guard
    if not guard.record(told is None):
        return
    if not guard.rolled_back:
        guard.moments.forget()
        place = roll_back(module, guard.archive)
        if place is not None:
            guard.start_over()
            log.warning("too many non-finite updates: weights and optimizer are back at %s; this happens once", place)
            return
    raise TrainingDivergedError(
        f"training stopped: {guard.nonfinite} of {guard.updates} updates were not finite, the last ones in a row or "
        f"within {guard.limits.window} updates; {told}; look at it, or try a smaller optim.lr"
    )
