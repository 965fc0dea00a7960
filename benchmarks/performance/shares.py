"""Where a step of ours spends its time: operators by kind, from torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "products": ("mm", "linear", "matmul"),
    "optimizer": ("adamw", "Optimizer"),
    "sampling, log-probs": ("softmax", "logsumexp", "sort", "topk", "exponential", "multinomial", "argmax"),
    "copies, lookups": ("copy", "cat", "index", "gather", "scatter", "embedding", "clone", "fill", "zero", "masked"),
}
"""Kind of operator -> parts of a name, the first that fits counts; every other operator is arithmetic on elements."""
ELEMENTS, OUTSIDE = "elements", "outside operators"


def kind_of(name: str) -> str:
    """Of an operator such as `aten::addmm`."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), ELEMENTS)


def by_kind(operators: Iterable[tuple[str, float]], seconds: float) -> dict[str, float]:
    """Shares of a step of `seconds`, from (name, seconds without its callees) of every operator.

    What is left is Python, waiting for rewards or for memory. The shares sum to 1.
    """
    found = dict.fromkeys([*KINDS, ELEMENTS], 0.0)
    for name, own in operators:
        found[kind_of(name)] += own / seconds
    return {**found, OUTSIDE: max(0.0, 1 - sum(found.values()))}


class OneStep:
    """Profiles what happens between `begin` and `end`, on the processor."""

    def __init__(self) -> None:
        self._profile: Any = None

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()

    def end(self) -> list[tuple[str, float]]:
        """(name, seconds without its callees) of every operator; [] when nothing was begun."""
        if self._profile is None:
            return []
        self._profile.__exit__(None, None, None)
        events, self._profile = self._profile.key_averages(), None
        return [(event.key, event.self_cpu_time_total / 1e6) for event in events]
