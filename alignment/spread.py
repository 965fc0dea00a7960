"""Tensors that are spread over ranks (torch's `DTensor`): each rank holds a part. Nothing here costs a plain tensor
anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from alignment import distributed

_DTENSOR = "torch.distributed.tensor"
"""Imported where it is used, since that takes a second; no tensor is spread before."""


def is_spread(tensor: object) -> bool:
    """Whether this rank holds a part of the tensor only."""
    module = sys.modules.get(_DTENSOR)
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, in its memory and without gradient; a plain tensor as it is."""
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def is_twin(tensor: Tensor) -> bool:
    """Whether the processes of a rank (`alignment.distributed`) hold the same part of a spread tensor."""
    if distributed.twins() == 1:
        return False
    placements, mesh = tensor.placements, tensor.device_mesh  # type: ignore[attr-defined]
    return bool(mesh.size() < distributed.processes() or any(placement.is_replicate() for placement in placements))


def own_share(tensor: Tensor) -> float:
    """What a sum over all processes counts this one's part of a spread tensor with: 1, or less where its twins hold the
    same."""
    return 1.0 / distributed.twins() if is_twin(tensor) else 1.0


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank; a plain tensor as it is. A collective for one that is spread."""
    if not is_spread(tensor):
        return tensor
    full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


def gathered(tensor: Tensor) -> Tensor:
    """All of it, on every rank, with a gradient: each rank's part gets the sum over ranks. A plain tensor as it is; a
    collective for one that is spread, and so is its backward."""
    if not is_spread(tensor):
        return tensor
    from torch.distributed.tensor import Partial

    full: Tensor = tensor.full_tensor(grad_placements=[Partial()])  # type: ignore[attr-defined]
    return full


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, spread as `like` is."""
    return from_part(own_block(tensor, like).clone(), like)


def own_block(tensor: Tensor, like: Tensor) -> Tensor:
    """What this rank would hold of a whole tensor that were spread as `like` is: a view."""
    shape, offset = place_of(like)
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def place_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of what this rank holds, where it begins in each dimension) of a spread tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return tuple(shape), tuple(offset)


def from_part(part: Tensor, like: Tensor) -> Tensor:
    """A tensor spread as `like` is, of which this rank holds `part`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.to(like.device),
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def clip_gradients(parameters: Sequence[nn.Parameter], bound: float, norm: Tensor) -> None:
    """Scale gradients to an L2 norm of at most `bound`, when `norm` [] is that of all of them together."""
    if not any(is_spread(p) for p in parameters):
        nn.utils.clip_grads_with_norm_(parameters, bound, norm)
        return
    coefficient = float((bound / (norm + 1e-6)).clamp(max=1.0))  # torch's formula, which takes no mixture of tensors
    for p in parameters:
        if p.grad is not None:
            local(p.grad).mul_(coefficient)
