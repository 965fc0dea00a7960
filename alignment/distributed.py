"""The few collectives the engine needs. Each is a no-op in a single process and must be called by every rank.

Notes are none: any rank may leave one, and read it, at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NOTES = "alignment/notes"


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


def leave_note(name: str) -> None:
    """Leave a note that other ranks see with `has_note`, whatever they are doing meanwhile."""
    if world_size() > 1:
        _store().set(f"{_NOTES}/{name}", "")


def has_note(name: str) -> bool:
    """Whether a rank has left this note: one question to the store the ranks met at."""
    return world_size() > 1 and bool(_store().check([f"{_NOTES}/{name}"]))


def remove_note(name: str) -> None:
    """Take a note away again, if there is one."""
    if has_note(name):
        _store().delete_key(f"{_NOTES}/{name}")


def _store() -> Any:
    # torch has no public way to it. Not a collective: a rank that computes could not take part in one.
    return dist.distributed_c10d._get_default_store()


def union_of_names(names: Iterable[str]) -> list[str]:
    """Sorted union of every rank's names: packed reductions use one key order, and nobody waits for an absent one."""
    gathered: set[str] = set()
    for part in all_gather_objects(sorted(names)):
        gathered.update(part)  # type: ignore[arg-type]
    return sorted(gathered)
