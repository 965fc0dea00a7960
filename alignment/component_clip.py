"""Clipping the gradient of each component of a loss by itself, in proportion to that component.

    g_i = gradient of lambda_i L_i     n_i = |g_i|     tau_i = max(kappa |L_i|, tau_min)
    c_i = min(1, tau_i / (n_i + 1e-6))                 g = sum_i c_i g_i

Every g_i is that of the whole batch over all ranks before anything is clipped, so the result depends neither on the
order of the components nor on micro-batches; c_i is never negative, so no component is turned round; what was captured
leaves `.grad` again. The usual clip of the whole (`optim.clip_norm`) comes after it.

`parameters` takes n_i over all trained parameters: one backward pass a component, one gradient more in memory for each.
`states` takes it over the hidden states below the LM head, which costs a pass through the head a component and still
one backward pass through the trunk. A batch of several micro-batches is then read twice, the first time without a
graph of the trunk: c_i has to be known before anything goes back through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.components import GradientStore, accumulate_objectives, weighted_sum
from alignment.errors import UserError
from alignment.metrics import Metrics
from alignment.skipped import Rerun
from alignment.tied_rows import gathering_gradients
from alignment.update import Counts, optimizer_of, reduce_gradients, step, total_norm

if TYPE_CHECKING:
    from alignment.training import TrainingMixin

At = Literal["parameters", "states"]


@dataclass(kw_only=True)
class ComponentClipConfig:
    """Bound of the gradient of each component of the loss.

    Args:
        ratio: kappa, the largest gradient norm over the size of the component itself.
        least: tau_min, the bound of a component that is near 0.
        at: `parameters`, the norm that the optimizer sees; `states`, that at the hidden states, much cheaper.
    """

    ratio: float = 2.0
    least: float = 1e-3
    at: At = "parameters"

    def __post_init__(self) -> None:
        for name, value in (("ratio", self.ratio), ("least", self.least)):
            if not value > 0:
                raise UserError(f"component_clip.{name} is {value}; it must be positive")
        if self.at not in get_args(At):
            raise UserError(f"component_clip.at is '{self.at}'; it is one of {', '.join(get_args(At))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The components of a micro-batch's loss, in a fixed order.

    Args:
        shares: name -> share of lambda_i L_i [], with its graph. values: name -> share of L_i [], float64.
        metrics: of this micro-batch.
    """

    shares: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    metrics: Metrics


class ComponentsFn(Protocol):
    """The components of a micro-batch, for the counts of the whole batch; from given hidden states [C, H] (those of
    hidden="before"), or from a pass of its own."""

    def __call__(self, micro: GroupBatch, counts: Counts, states: Tensor | None = None) -> Components: ...


class StatesFn(Protocol):
    """[C, H] hidden states of a micro-batch that predict its tokens."""

    def __call__(self, micro: GroupBatch) -> Tensor: ...


def clip_coefficients(norms: Tensor, losses: Tensor, config: ComponentClipConfig) -> Tensor:
    """[I] gradient norms, [I] losses -> [I] c_i; NaN where one of them is."""
    bounds = (config.ratio * losses.abs()).clamp(min=config.least)
    return (bounds / (norms + 1e-6)).clamp(max=1.0)


def update_at_parameters(
    module: TrainingMixin,
    batch: GroupBatch,
    components: ComponentsFn,
    names: Sequence[str],
    config: ComponentClipConfig,
    counts: Counts,
) -> None:
    """`alignment.update.update` with the gradient of each component clipped on its own over all parameters."""
    optimizer, parameters = optimizer_of(module)
    optimizer.zero_grad()
    stores = {name: GradientStore(parameters) for name in names}
    values = torch.zeros(len(names), dtype=torch.float64, device=module.device)

    def parts(micro: GroupBatch, counts: Counts) -> tuple[Mapping[str, Tensor], Metrics]:
        found = components(micro, counts)
        values.add_(torch.stack([found.values[name].to(values) for name in names]))
        return found.shares, found.metrics

    shares, metrics = accumulate_objectives(module, batch, parts, stores, True, counts)
    norms = torch.zeros_like(values)
    for i, store in enumerate(stores.values()):
        with store.open():
            reduce_gradients(parameters)
        if grads := [g for g in store.gradients if g is not None]:
            norms[i] = total_norm(grads).to(norms)
    coefficients = clip_coefficients(norms, distributed.all_reduce_sum(values), config)
    factors = coefficients.tolist()
    for p, *gradients in zip(parameters, *(s.gradients for s in stores.values()), strict=True):
        p.grad = weighted_sum(gradients, factors)
    _note(module, names, norms, factors, "grad_norm")
    named = dict(zip(names, norms.tolist(), strict=True))
    step(module, batch, shares.sum(), metrics, named, Rerun.of_parts(parts, counts, keep_groups=True))


def update_at_states(
    module: TrainingMixin,
    batch: GroupBatch,
    components: ComponentsFn,
    states: StatesFn,
    names: Sequence[str],
    config: ComponentClipConfig,
    counts: Counts,
) -> None:
    """`alignment.update.update` with each component scaled by what clips its gradient at the hidden states."""
    micros = list(module.micro_batches(batch))
    held: Components | None = None
    squares = torch.zeros(len(names), dtype=torch.float64, device=module.device)
    values = torch.zeros_like(squares)
    one = len(micros) == 1  # whose graph is kept for the update; of several only the head's is ever held
    for micro in micros:
        with torch.set_grad_enabled(one), gathering_gradients():  # the trunk's backward is that of the update
            hidden = states(micro)
        # Also where all below the head is frozen.
        hidden = hidden if one and hidden.requires_grad else hidden.detach().requires_grad_()
        found = components(micro, counts, hidden)
        squares += torch.stack([_square(found.shares[name], hidden).to(squares) for name in names])
        values += torch.stack([found.values[name].to(values) for name in names])
        held = found if one else None
    squares, values = distributed.all_reduce_sum(torch.stack([squares, values]))
    norms = squares.sqrt()
    factors = clip_coefficients(norms, values, config).tolist()

    def loss(micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        nonlocal held
        found, held = components(micro, counts) if held is None else held, None  # its graph serves once
        clipped = torch.stack([found.shares[name] * c for name, c in zip(names, factors, strict=True)]).sum()
        whole = torch.stack([found.shares[name].detach() for name in names]).sum()
        return clipped + (whole - clipped.detach()), found.metrics  # the objective's value, the clipped gradient

    _note(module, names, norms, factors, "grad_norm/states")
    module.update(batch, loss, counts=counts)


def _square(share: Tensor, states: Tensor) -> Tensor:
    """[] squared norm of the share's gradient at the states; 0 for a component that does not depend on them."""
    if not share.requires_grad:
        return share.new_zeros(())
    # Not a gradient of parameters: what components.py says against `torch.autograd.grad` is about those.
    (gradient,) = torch.autograd.grad(share, states, retain_graph=True, allow_unused=True)
    return share.new_zeros(()) if gradient is None else gradient.double().square().sum()


def _note(module: TrainingMixin, names: Sequence[str], norms: Tensor, factors: Sequence[float], prefix: str) -> None:
    told = {f"{prefix}/{name}": n for name, n in zip(names, norms.tolist(), strict=True)}
    module.note_values(told | {f"grad/clip_coef/{name}": c for name, c in zip(names, factors, strict=True)})
