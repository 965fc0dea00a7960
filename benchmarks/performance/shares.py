"""Where a step of ours spends its time: operators by kind, from torch's profiler."""

from __future__ import annotations

import time
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
        self._begun = 0.0

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()
        self._begun = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """`operators`: (name, seconds without its callees) of each; `profiled`: seconds between. {} when nothing was
        begun. What the profiler does with its records afterwards is not in them."""
        if self._profile is None:
            return {}
        seconds = time.perf_counter() - self._begun
        self._profile.__exit__(None, None, None)
        events, self._profile = self._profile.key_averages(), None
        return {"operators": [(e.key, e.self_cpu_time_total / 1e6) for e in events], "profiled": seconds}
