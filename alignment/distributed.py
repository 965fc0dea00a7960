"""The few collectives the engine needs. Each is a no-op in a single process and must be called by every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum over ranks. Returns a new tensor; the input is left alone."""
    if world_size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def any_rank(flag: bool, device: torch.device | str = "cpu") -> bool:
    """True on every rank when it is true on one."""
    if world_size() == 1:
        return flag
    return bool(all_reduce_sum(torch.tensor([float(flag)], device=device)).item() > 0)


def all_gather_objects(value: object) -> list[object]:
    """The picklable value of every rank, in rank order."""
    if world_size() == 1:
        return [value]
    out: list[object] = [None] * world_size()
    dist.all_gather_object(out, value)
    return out


def union_of_names(names: Iterable[str]) -> list[str]:
    """Sorted union of every rank's names: packed reductions use one key order, and nobody waits for an absent one."""
    gathered: set[str] = set()
    for part in all_gather_objects(sorted(names)):
        gathered.update(part)  # type: ignore[arg-type]
    return sorted(gathered)
