"""Rewards of the built-in customer-support world, by its own judges; for prompts of `data.path: world:support`."""

from __future__ import annotations

from alignment import world


def right(completion: str, answer: str | None, attribute: str | None) -> float | None:
    """1 where a reply gives the value in the prompt's FAQ and no other value of its kind, 0 elsewhere. Abstains where
    the row has no `answer`, or does not say of which `attribute` it is."""
    if answer is None or attribute is None:
        return None
    return float(world.right(completion, {"answer": answer, "attribute": attribute}))


def warmth(completion: str) -> float:
    """0 to 1: half a point for each of thanking, gladness, an offer and a good wish, at most 1."""
    return world.warmth(completion)
