"""An update whose gradient is made from those of several objectives, each captured by itself.

Every objective has a backward pass of its own through the micro-batch's one forward pass. Its gradient gathers in a
store beside `.grad`, over the whole batch, and is summed over ranks like any other; then a function of the Gram matrix
says how much of each is taken. What is no objective (KL, entropy bonus, value loss) is added after that, as it is:

    g = sum_k a_k(M) g_k + g_rest,    M = G G^T

Not `torch.autograd.grad`: under DDP it gives values of one rank, under FSDP2 nothing. K objectives keep K gradients
beside the last one, and cost K + 1 backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.metrics import Metrics, add_metrics
from alignment.skipped import Rerun
from alignment.spread import is_spread, local, own_share
from alignment.tied_rows import gathering_gradients
from alignment.update import Counts, has_gradient, optimizer_of, reduce_gradients, step, without_ddp_reduction

if TYPE_CHECKING:
    from alignment.training import TrainingMixin

REST = "/rest"
"""Name of what is added to the combined gradient as it is. No reward can be called this."""

_CHUNK = 1 << 20
"""Elements of each gradient that are in float64 at a time."""

PartsFn = Callable[[GroupBatch, Counts], tuple[Mapping[str, Tensor], Metrics]]
"""fn(micro-batch, counts of the whole batch) -> (name -> share of that loss [], metrics): every objective, and REST."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What is known of K objectives of a batch, over all ranks; float64 on the CPU.

    Args:
        names: K. gram: [K, K] inner products of their gradients. losses: [K].
    """

    names: tuple[str, ...]
    gram: Tensor
    losses: Tensor

    @property
    def norms(self) -> Tensor:
        """[K] L2 norms of the gradients."""
        return self.gram.diagonal().sqrt()

    def metrics(self, coefficients: Tensor | None) -> Metrics:
        """`loss/NAME`, `grad_norm/NAME`, with coefficients `grad/weight/NAME` (a_k), and `grad/cos/NAME/OTHER` of
        gradients that both have a length."""
        one, norms = torch.ones((), dtype=torch.float64), self.norms
        out: Metrics = {}
        for k, name in enumerate(self.names):
            out[f"loss/{name}"] = (self.losses[k], one)
            out[f"grad_norm/{name}"] = (norms[k], one)
            if coefficients is not None:
                out[f"grad/weight/{name}"] = (coefficients[k], one)
        for j, k in combinations(range(len(self.names)), 2):
            if float(norms[j] * norms[k]) > 0:
                out[f"grad/cos/{self.names[j]}/{self.names[k]}"] = (self.gram[j, k] / (norms[j] * norms[k]), one)
        return out


CombineFn = Callable[[Objectives], Tensor]
"""fn(objectives) -> [K] coefficients a. Every rank sees the same and must return the same."""


class GradientStore:
    """Gradients of one objective, in the order of the parameters; in `.grad` only inside `with store.open()`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.gradients: list[Tensor | None] = [None] * len(parameters)

    @contextmanager
    def open(self) -> Iterator[None]:
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        yield
        self.gradients = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None


def update_objectives(
    module: TrainingMixin,
    batch: GroupBatch,
    parts_fn: PartsFn,
    names: Sequence[str],
    combine: CombineFn | None,
    *,
    keep_groups: bool = True,
    counts: Counts | None = None,
) -> None:
    """`alignment.update.update` with a gradient combined from those of the objectives `names`.

    The logged loss is sum_k a_k L_k + L_rest, whose gradient this is. `combine` is not asked when something is not
    finite; the step is then skipped as usual. None: the objectives are only measured, and the rest is all there is.

    Raises ValueError when an objective depends on a parameter that got no gradient from it.
    """
    optimizer, parameters = optimizer_of(module)
    optimizer.zero_grad()
    stores = {name: GradientStore(parameters) for name in (*names, REST)}
    counts = Counts.of(batch) if counts is None else counts
    shares, metrics = accumulate_objectives(module, batch, parts_fn, stores, keep_groups, counts)
    for store in stores.values():
        with store.open():
            reduce_gradients(parameters)
    chosen = [stores[name] for name in names]
    losses = distributed.all_reduce_sum(shares).cpu()
    found = Objectives(names=tuple(names), gram=gram_of([s.gradients for s in chosen]).cpu(), losses=losses[:-1])
    share, coefficients = shares[-1], None
    if combine is None:
        chosen = []
    else:
        finite = bool(torch.isfinite(losses).all() and torch.isfinite(found.gram).all())
        coefficients = combine(found).double() if finite else torch.full_like(found.losses, torch.nan)
        share = (shares[:-1] * coefficients.to(shares)).sum() + share
    factors = [1.0] if coefficients is None else [*coefficients.tolist(), 1.0]
    for p, *gradients in zip(parameters, *(s.gradients for s in chosen), stores[REST].gradients, strict=True):
        p.grad = weighted_sum(gradients, factors)
    if distributed.rank() == 0:
        add_metrics(metrics, found.metrics(coefficients))
    norms = dict(zip(names, found.norms.tolist(), strict=True))
    step(module, batch, share, metrics, norms, Rerun.of_parts(parts_fn, counts, keep_groups))


def accumulate_objectives(
    module: TrainingMixin,
    batch: GroupBatch,
    parts_fn: PartsFn,
    stores: Mapping[str, GradientStore],
    keep_groups: bool,
    counts: Counts,
) -> tuple[Tensor, Metrics]:
    """Backward of every objective of every micro-batch into its store. Returns this rank's shares of the losses in the
    order of the stores (float64) and its metrics."""
    module.note_batch_size(counts.prompts)
    shares = torch.zeros(len(stores), dtype=torch.float64, device=module.device)
    metrics: Metrics = {}
    with without_ddp_reduction(module), gathering_gradients():
        for micro in module.micro_batches(batch, keep_groups=keep_groups):
            parts, part_metrics = parts_fn(micro, counts)
            assert parts.keys() == stores.keys(), "a part for every objective, and the rest"
            live = [n for n in stores if (parts[n].requires_grad if n == REST else has_gradient(parts[n], micro))]
            for name in live:
                with stores[name].open():
                    module.manual_backward(parts[name], retain_graph=name != live[-1])
                check_reached(name, parts[name], stores[name])
            shares += torch.stack([parts[name].detach().double() for name in stores])
            add_metrics(metrics, part_metrics)
    return shares, metrics


# ---------------------------------------------------------------------- parts


def gram_of(gradients: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """K lists of one gradient for each parameter -> [K, K] float64 inner products over all of them; None is 0. A
    collective where gradients are spread over ranks.

    A chunk of each gradient at a time is copied to float64, so that a small difference of large products stays.
    """
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    of_parts = torch.zeros_like(total)  # of gradients that are spread over ranks, what this rank holds
    spread = False
    for tensors in zip(*gradients, strict=True):
        there = [k for k, t in enumerate(tensors) if t is not None]
        if not there:
            continue
        flat = [local(t).reshape(-1) for t in tensors if t is not None]
        total, of_parts = total.to(flat[0].device), of_parts.to(flat[0].device)
        cut = next((own_share(t) for t in tensors if t is not None and is_spread(t)), 0.0)  # 0: none of them is
        spread, onto = spread or cut > 0, of_parts if cut else total
        index = torch.tensor(there, device=total.device)
        for start in range(0, flat[0].numel(), _CHUNK):
            block = torch.stack([t[start : start + _CHUNK].double() for t in flat])
            onto[index[:, None], index] += block @ block.T * (cut or 1.0)
    return total + distributed.sum_over_processes(of_parts) if spread else total


def weighted_sum(tensors: Sequence[Tensor | None], factors: Sequence[float]) -> Tensor | None:
    """sum of factor * tensor, in place of the first one there is; None is 0, and None comes of nothing else."""
    out: Tensor | None = None
    for tensor, factor in zip(tensors, factors, strict=True):
        if tensor is not None:
            out = tensor.mul_(factor) if out is None else out.add_(tensor, alpha=factor)
    return out


def check_reached(name: str, part: Tensor, store: GradientStore) -> None:
    """Raise ValueError when the graph of `part`, whose backward has run, leads to a parameter without a gradient."""
    lacking = {id(p): p for p, g in zip(store.parameters, store.gradients, strict=True) if g is None}
    if not lacking:
        return
    if len(lacking) == len(store.parameters):
        raise ValueError(f"the backward pass of '{name}' gave no parameter a gradient")
    lost = [lacking[i] for i in _leaves(part) if i in lacking]
    if lost:
        raise ValueError(
            f"'{name}' depends on {len(lost)} parameters that got no gradient from it, for example one of shape "
            f"{tuple(lost[0].shape)}"
        )


def _leaves(part: Tensor) -> set[int]:
    """`id` of every parameter that the graph of `part` leads to."""
    found: set[int] = set()
    seen, todo = set(), [part.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.add(id(node.variable))  # type: ignore[attr-defined]
        todo += [following for following, _ in node.next_functions]
    return found
