"""The dial of a policy with heads: what it says under each preference, from one training run, and the front of that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from textwrap import wrap
from typing import Any, Protocol, runtime_checkable

from alignment.panels import colour_bar, diverging, panels, plain_axes
from alignment.pareto import on_front
from alignment.protocols import Judges


@runtime_checkable
class HasDial(Judges, Protocol):
    """A module that is evaluated under a preference among its rewards: `alignment.headed.HeadedMixin`.

    Attributes:
        weights: name -> weight of every reward. dial: the preference in force, shares of 1 in their order.
    """

    weights: dict[str, float]
    dial: tuple[float, ...]

    def turn_dial(self, weights: Mapping[str, float]) -> None:
        """Evaluate under these weights from now on."""
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


def summary(points: Sequence[Point]) -> str:
    """What all preferences together gave, in a few words."""
    different = {_shown(point.rewards.values()) for point in points}
    if len(different) == 1:
        return f"all {len(points)} preferences gave the same rewards"
    best = {_shown(point.rewards.values()) for point in points if point.front}
    return f"{len(points)} preferences gave {len(different)} different points, {len(best)} of them on the front"


def _shown(values: Iterable[float]) -> tuple[str, ...]:
    """By which equal points are one, NaN among their values or not."""
    return tuple(str(value) for value in values)


def draw(points: Sequence[Point], path: Path) -> None:
    """A panel for each pair of rewards: its different points, their colour the share of the reward on the x axis of the
    two (the mean of all preferences that gave the point, whose number stands beside it), and a line through those on
    the front of that pair."""
    pairs = list(combinations(points[0].rewards, 2))
    figure, panel = panels(len(pairs), 4.0, 3.5)
    for axes, (a, b) in zip(panel, pairs, strict=True):
        found: dict[tuple[str, ...], list[Point]] = {}
        for point in points:
            found.setdefault(_shown((point.rewards[a], point.rewards[b])), []).append(point)
        values = [(group[0].rewards[a], group[0].rewards[b]) for group in found.values()]
        colours = [sum(_share(point, a, b) for point in group) / len(group) for group in found.values()]
        best = sorted(value for value, front in zip(values, on_front(values), strict=True) if front)
        axes.plot([p[0] for p in best], [p[1] for p in best], color="0.7", zorder=0)
        # The first is the largest and all let through what is below: points close together stay visible.
        sizes = [70 - 45 * k / len(values) for k in range(len(values))]
        look: dict[str, Any] = {"cmap": diverging(), "vmin": 0, "vmax": 1, "alpha": 0.8, "edgecolors": "0.3"}
        x, y = zip(*values, strict=True)
        dots = axes.scatter(x, y, c=colours, s=sizes, linewidths=0.6, **look)
        for value, group in zip(values, found.values(), strict=True):
            if len(group) > 1:
                axes.annotate(f"{len(group)}x", value, xytext=(6, 4), textcoords="offset points", fontsize=7)
        axes.set_xlabel(a, fontsize=9)
        axes.set_ylabel(b, fontsize=9)
        plain_axes(axes, x, y)
    colour_bar(figure, dots, panel, "share of the x axis's reward of the two")
    title = wrap("one policy, its dial turned: " + summary(points), int(13 * figure.get_figwidth()))
    figure.suptitle("\n".join(title), fontsize=9)
    figure.savefig(path, dpi=150)


def _share(point: Point, a: str, b: str) -> float:
    both = point.weights[a] + point.weights[b]
    return point.weights[a] / both if both else 0.5
