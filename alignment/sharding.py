"""FSDP2: a model whose parameters, gradients and moments are cut over ranks, one transformer block after the other.

A block gathers its parameters before its forward and its backward, and frees them afterwards; what stays on a rank is
its share of everything (`DTensor`, cut along the first dimension). Gradients are summed over ranks as they are freed,
in each micro-batch, never averaged: `alignment.update` divides by the counts of the whole batch.

Every forward and backward is a collective. So ranks go through the same number of micro-batches (`in_step`), and a
model with nothing to compute runs all the same (`LogProbEngine`). Code that reads parameters past a model's own
forward, as the engine reads the LM head, does so `inside`; code that runs layers as often as it likes, as rollouts do,
has all parameters whole meanwhile (`unsharded`).

Base weights in 4 or 8 bits are packed codes beside statistics that know their place: cut, they have been read wrongly
without an error (bitsandbytes issue 1945). They are frozen, so they stay whole on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.tensor_parallel import cut_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_PACKED = ("Params4bit", "Int8Params")
"""Parameters of bitsandbytes."""

_FSDP = "torch.distributed.fsdp"
"""Imported where it is used, since that takes a second."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How models are cut; called with a model it cuts it in place, as the transform `fully_shard`.

    Args:
        mesh: one-dimensional: the ranks.
        twins: one-dimensional: the processes of this rank, among which layers are cut first
            (`alignment.tensor_parallel`). None where each rank is one process.
        param_dtype: format in which parameters are gathered and blocks computed. None: that of the parameters.
        reduce_dtype: format in which gradients are summed over ranks. None: that of the gradients.
    """

    mesh: DeviceMesh
    twins: DeviceMesh | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __call__(self, model: nn.Module) -> nn.Module:
        """Raises UserError for a model whose blocks cannot be told, or which cannot be cut."""
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
        from transformers import PreTrainedModel
        from transformers.modeling_layers import GradientCheckpointingLayer

        root = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
        blocks = [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not blocks:
            raise UserError(
                f"callbacks.FSDP2 cannot tell the blocks of {type(root).__name__}; use trainer.strategy ddp for it"
            )
        if self.twins is not None:
            cut_layers(root, self.twins, self.mesh.size())
        settings: dict[str, Any] = {
            "mesh": self.mesh,
            # The outermost too: between forward and backward its parameters are found as they are at any other time.
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype),
            "ignored_params": {p for p in root.parameters() if type(p).__name__ in _PACKED},
        }
        for module in (*reversed(blocks), root):  # a block within a block first
            fully_shard(module, **settings)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        root.run_inside = MethodType(_run, root)  # type: ignore[assignment]
        register_fsdp_forward_method(root, "run_inside")
        _SHARDED[root] = self
        inside(root, tuple)  # the first call decides which module is the outermost
        return model


_SHARDED: WeakKeyDictionary[nn.Module, Sharding] = WeakKeyDictionary()
"""Outermost module -> how it was cut."""


def _run(module: nn.Module, function: Callable[[], Any]) -> Any:
    result = function()
    if not isinstance(result, tuple):
        return result
    # FSDP2 puts its hooks on what comes back, which a change in place would take off a view.
    return tuple(t.clone() if isinstance(t, Tensor) and t._is_view() else t for t in result)


def sharding_of(model: nn.Module) -> Sharding | None:
    """How the model, or the one it wraps, was cut; None for one that is whole."""
    return next((_SHARDED[m] for m in model.modules() if m in _SHARDED), None) if _SHARDED else None


def is_sharded(model: nn.Module) -> bool:
    """Whether it, or a part of it, is cut over ranks."""
    return sharding_of(model) is not None


def inside(root: nn.Module, function: Callable[[], T]) -> T:
    """What `function` returns, tensors in tuples, with the parameters of `root` outside its blocks whole during it and
    during its backward. A collective where `root` is sharded; elsewhere a plain call."""
    if root not in _SHARDED:
        return function()
    try:
        result: T = root.run_inside(function)  # type: ignore[operator]
    except BaseException:
        root.reset_iter_state()  # type: ignore[operator]  # what an unfinished forward has gathered
        raise
    return result


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """All parameters whole on every rank inside the block, which computes no gradients. A collective on entry."""
    if not is_sharded(model):
        yield
        return
    parts = [m for m in model.modules() if isinstance(m, sys.modules[_FSDP].FSDPModule)]
    root = parts[0]
    root.set_reshard_after_forward(False)
    try:
        for part in parts:
            part.unshard()
        yield
    finally:
        root.reset_iter_state()
        root.set_reshard_after_forward(True)


def in_step(model: nn.Module, micros: Iterable[GroupBatch], batch: GroupBatch) -> Iterator[GroupBatch]:
    """The micro-batches of `batch`; where the model is sharded, empty ones follow on ranks that have fewer, with values
    under every name that any rank has some under. A collective."""
    if distributed.world_size() == 1 or not is_sharded(model):
        yield from micros
        return
    own = list(micros)
    reports: Any = distributed.all_gather_objects((len(own), [*batch.rows], [*batch.tokens]))
    yield from own
    none, empty = torch.zeros(0, device=batch.device), batch.select_groups([])
    empty = replace(
        empty,
        rows={name: empty.rows.get(name, none) for _, names, _ in reports for name in names},
        tokens={name: empty.tokens.get(name, none) for _, _, names in reports for name in names},
    )
    for _ in range(max(count for count, _, _ in reports) - len(own)):
        yield empty


def one_token(token: int, device: torch.device) -> GroupBatch:
    """What a model reads in place of nothing: a token after a token."""
    return GroupBatch.from_groups([Group(prompt=[token], completions=[[token]])]).to(device)
