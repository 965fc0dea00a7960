"""How good a set of compromises is: its front, hypervolume, expected utility and sparsity.

Points are more-is-better values in the same order, one tuple for each compromise. Definitions follow morl-baselines
(Felten et al. 2023), whose page advises against comparing by sparsity alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Point = Sequence[float]


def dominates(a: Point, b: Point) -> bool:
    """Whether a is nowhere less than b and somewhere more."""
    return all(x >= y for x, y in zip(a, b, strict=True)) and any(x > y for x, y in zip(a, b, strict=True))


def on_front(points: Sequence[Point]) -> list[bool]:
    """Which points no other one dominates. A point with a NaN is on no front."""
    return [all(v == v for v in point) and not any(dominates(other, point) for other in points) for point in points]


def hypervolume(points: Sequence[Point], reference: Point | None = None) -> float:
    """Volume between the reference (0 in every direction) and the points: that of all places some point dominates."""
    if not points:
        return 0.0
    zero = reference or [0.0] * len(points[0])
    above = [[v - z for v, z in zip(point, zero, strict=True)] for point in points]
    return _volume([point for point in above if all(v > 0 for v in point)])


def _volume(points: Sequence[Point]) -> float:
    """By slices along the last direction: between two heights the cross-section is that of the points above."""
    if not points:
        return 0.0
    if len(points[0]) == 1:
        return max(point[0] for point in points)
    total, below = 0.0, 0.0
    for height in sorted({point[-1] for point in points}):
        total += (height - below) * _volume([point[:-1] for point in points if point[-1] >= height])
        below = height
    return total


def expected_utility(points: Sequence[Point], weights: Sequence[Point]) -> float:
    """Mean over preferences of the best weighted sum that some point reaches."""
    best = (max(sum(w * v for w, v in zip(ws, p, strict=True)) for p in points) for ws in weights)
    return sum(best) / len(weights)


def sparsity(points: Sequence[Point]) -> float:
    """Mean squared gap between neighbours, added up over the directions; 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    columns = [sorted(values) for values in zip(*points, strict=True)]
    gaps = [(b - a) ** 2 for values in columns for a, b in pairwise(values)]
    return float(sum(gaps)) / (len(points) - 1)
