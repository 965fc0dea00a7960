"""The few collectives the engine needs. Each is a no-op in a single process and must be called by every process.

A rank reads rows of its own. Mostly it is one process; where a model is cut tensor-parallel it is several, its twins:
they read the same rows, compute the same numbers, and stand in a collective over ranks with one process of every other
rank. So what is summed or gathered over ranks counts every row once. What a process alone may find out (a disk that is
full, a signal) and the files it writes go by processes.

Notes are none: any process may leave one, and read it, at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NOTES = "alignment/notes"

_RANKS: Any = None
"""Process group with one process of each rank; None where every process is a rank."""
_TWINS: Any = None
"""Process group of the processes that are one rank; None where each is alone."""


def share_ranks(ranks: Any, twins: Any) -> None:
    """From now on the processes of the group `twins` are one rank, and `ranks` is the group of one process of each. Two
    None: every process is a rank of its own."""
    global _RANKS, _TWINS
    _RANKS, _TWINS = ranks, twins


def processes() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process() -> int:
    """The number of this one; the first writes and tells what is said once."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size(_RANKS) if processes() > 1 else 1


def rank() -> int:
    """The number of this process's rank."""
    return dist.get_rank(_RANKS) if processes() > 1 else 0


def twins() -> int:
    """How many processes a rank has."""
    return 1 if _TWINS is None or processes() == 1 else dist.get_world_size(_TWINS)


def speaks_for_rank() -> bool:
    """Whether this process is the first of its rank."""
    return twins() == 1 or dist.get_rank(_TWINS) == 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum over ranks. Returns a new tensor; the input is left alone."""
    if world_size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=_RANKS)
    return total


def sum_over_processes(values: Tensor) -> Tensor:
    """Sum over all processes. Returns a new tensor; the input is left alone."""
    if processes() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def sum_over_twins_(values: Tensor) -> None:
    """Sum over the processes of each rank, in place."""
    if twins() > 1:
        dist.all_reduce(values, group=_TWINS)


def any_rank(flag: bool, device: torch.device | str = "cpu") -> bool:
    """True on every process when it is true on one."""
    if processes() == 1:
        return flag
    return bool(sum_over_processes(torch.tensor([float(flag)], device=device)).item() > 0)


def all_gather_objects(value: object) -> list[object]:
    """The picklable value of every rank, in rank order."""
    if world_size() == 1:
        return [value]
    out: list[object] = [None] * world_size()
    dist.all_gather_object(out, value, group=_RANKS)
    return out


def gather_from_processes(value: object) -> list[object]:
    """The picklable value of every process, in their order."""
    if processes() == 1:
        return [value]
    out: list[object] = [None] * processes()
    dist.all_gather_object(out, value)
    return out


def leave_note(name: str) -> None:
    """Leave a note that other processes see with `has_note`, whatever they are doing meanwhile."""
    if processes() > 1:
        _store().set(f"{_NOTES}/{name}", "")


def has_note(name: str) -> bool:
    """Whether a process has left this note: one question to the store they met at."""
    return processes() > 1 and bool(_store().check([f"{_NOTES}/{name}"]))


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
