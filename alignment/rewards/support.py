"""Rewards of the built-in customer-support world, by its own judges; for prompts of `data.path: world:support`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment import world


def right(completion: str, columns: Mapping[str, Any]) -> float:
    """1 where a reply gives the value in the prompt's FAQ and no other value of its kind, 0 elsewhere."""
    return float(world.right(completion, columns))


def warmth(completion: str) -> float:
    """0 to 1: half a point for each of thanking, gladness, an offer and a good wish, at most 1."""
    return world.warmth(completion)
