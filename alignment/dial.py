"""The dial of a policy with heads: what it says under each preference, from one training run, and the front of that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from alignment.batches import GroupBatch
from alignment.pareto import on_front


@runtime_checkable
class HasDial(Protocol):
    """A module that is evaluated under a preference among its rewards: `alignment.headed.HeadedMixin`.

    Attributes:
        weights: name -> weight of every reward. dial: the preference in force, shares of 1 in their order.
    """

    weights: dict[str, float]
    dial: tuple[float, ...]

    def turn_dial(self, weights: Mapping[str, float]) -> None:
        """Evaluate under these weights from now on."""
        ...

    def judge(self, batch: GroupBatch) -> list[dict[str, Any]]:
        """Rows of sampled completions, with the mapping `rewards`: name -> value, None where it abstained."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting of the dial.

    Args:
        weights: name -> share. rewards: name -> mean over completions; NaN where none had one.
        completions: how many there were. front: no other point is better in one reward and as good in all others.
    """

    weights: dict[str, float]
    rewards: dict[str, float]
    completions: int
    front: bool


def grid(names: Sequence[str], steps: int) -> list[dict[str, float]]:
    """Every preference whose shares are multiples of 1 / steps."""
    return [dict(zip(names, (part / steps for part in parts), strict=True)) for parts in _parts(len(names), steps)]


def _parts(count: int, total: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (total,)
        return
    for first in range(total, -1, -1):
        for others in _parts(count - 1, total - first):
            yield (first, *others)


def points_of(settings: Sequence[Mapping[str, float]], rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[Point]:
    """From the rows that `judge` gave under each setting."""
    means = [{name: _mean([row["rewards"][name] for row in said]) for name in settings[0]} for said in rows]
    parts = zip(settings, means, rows, on_front([tuple(point.values()) for point in means]), strict=True)
    return [
        Point(weights=dict(weights), rewards=rewards, completions=len(said), front=front)
        for weights, rewards, said, front in parts
    ]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def to_json(points: Sequence[Point]) -> str:
    return json.dumps([asdict(point) for point in points], indent=1) + "\n"


def draw(points: Sequence[Point], path: Path) -> None:
    """A panel for each pair of rewards: every point, its colour the share of the first of the two among both, and a
    line through those on the front of that pair."""
    from matplotlib.figure import Figure  # imported where it is used: it takes a second

    pairs = list(combinations(points[0].rewards, 2))
    figure = Figure(figsize=(4.2 * len(pairs), 3.6), layout="constrained")
    for axes, (a, b) in zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
        values = [(point.rewards[a], point.rewards[b]) for point in points]
        shares = [point.weights[a] + point.weights[b] for point in points]
        colours = [point.weights[a] / share if share else 0.5 for point, share in zip(points, shares, strict=True)]
        best = sorted(value for value, front in zip(values, on_front(values), strict=True) if front)
        axes.plot([x for x, _ in best], [y for _, y in best], color="0.7", zorder=0)
        dots = axes.scatter(*zip(*values, strict=True), c=colours, cmap="coolwarm", vmin=0, vmax=1)
        axes.set(xlabel=a, ylabel=b)
        figure.colorbar(dots, ax=axes, label=f"share of {a} in {a} + {b}")
    figure.suptitle(f"one policy, {len(points)} preferences at decoding")
    figure.savefig(path, dpi=150)
