"""Rewards on token ids, the same on both sides; nothing but the standard library."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

SPIN = 0.03
"""CPU seconds that `slow` takes."""


def mixed(ids: Sequence[int]) -> int:
    """32 bits that depend on the sum of the ids."""
    return sum(ids) * 2654435761 % 2**32


def cheap(ids: Sequence[int], flat: bool = False) -> float:
    """In [0, 1); 0 for every completion of a flat row, whose group then has no variance."""
    return 0.0 if flat else mixed(ids) / 2**32


def slow(ids: Sequence[int], flat: bool = False) -> float:
    """`cheap` of the reversed ids, after `SPIN` seconds of CPU time of this thread."""
    until = time.thread_time() + SPIN
    while time.thread_time() < until:
        pass
    return cheap(ids[::-1], flat)


def raising(ids: Sequence[int], flat: bool = False) -> float:
    """`cheap` of all ids but the first. Raises ValueError for about one completion in a hundred."""
    if mixed(ids) % 100 == 0:
        raise ValueError("this reward has no value for this completion")
    return cheap(ids[1:], flat)


REWARDS: dict[str, Callable[[Sequence[int], bool], float]] = {"cheap": cheap, "slow": slow, "raising": raising}
