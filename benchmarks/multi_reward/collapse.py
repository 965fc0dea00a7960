"""The advantage collapse, counted: how many different things a group of completions can be told.

With K rewards that are 0 or 1, every multiset of G completions is one case. Its advantages, sorted and rounded to six
digits, are what the policy gets to see; cases with the same ones are not told apart.
"""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import torch

from alignment.advantages import ADVANTAGES, RewardTable, estimate

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("group", {"eps": 0.0}),
    "GRPO, no std": ("none", {}),
    "GDPO": ("gdpo", {"whiten": "none", "eps": 0.0}),
}
SIZES, COUNTS = range(2, 12), range(1, 6)


def distinct(kind: str, rewards: int, size: int) -> int:
    """Different advantage vectors of a group of `size` with that many rewards."""
    cases = list(combinations_with_replacement(list(product((0.0, 1.0), repeat=rewards)), size))
    table = RewardTable(
        rewards=torch.tensor(cases, dtype=torch.float64).reshape(-1, rewards),
        weights=torch.ones(rewards),
        group_of=torch.arange(len(cases)).repeat_interleave(size),
        groups=len(cases),
    )
    name, options = KINDS[kind]
    found = estimate(ADVANTAGES.get(name, options), table).values.double().reshape(-1, size)
    rounded = (found.sort(dim=1).values * 1e6).round().long()
    return len(torch.unique(rounded, dim=0))


def draw(path: Path) -> None:
    """Two panels: over the size of the group with two rewards, over the number of rewards in groups of four."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind in KINDS:
        left.plot(SIZES, [distinct(kind, 2, size) for size in SIZES], marker="o", markersize=3, label=kind)
        right.plot(COUNTS, [distinct(kind, count, 4) for count in COUNTS], marker="o", markersize=3, label=kind)
    left.set(xlabel="completions in a group, two rewards", ylabel="advantage vectors told apart")
    right.set(xlabel="rewards, groups of four", yscale="log", xticks=list(COUNTS))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
