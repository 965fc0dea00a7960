"""Fronts and their measures: the golden values, volumes by hand, properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.pareto import expected_utility, hypervolume, on_front, sparsity

POINTS = [(0.9, 0.2), (0.6, 0.6), (0.3, 0.8), (0.5, 0.5)]
sets = st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=6)


def test_golden_values() -> None:
    """G-MET. (.5, .5) is behind (.6, .6)."""
    assert on_front(POINTS) == [True, True, True, False]
    assert hypervolume(POINTS) == pytest.approx(0.48)
    weights = [(1, 0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0, 1)]
    assert expected_utility(POINTS, weights) == pytest.approx(0.74)
    assert sparsity(POINTS[:3]) == pytest.approx(0.19)


def test_equal_points_share_a_front_and_a_nan_is_on_none() -> None:
    assert on_front([(1.0, 0.0), (1.0, 0.0)]) == [True, True]
    assert on_front([(1.0, math.nan), (0.0, 0.0)]) == [False, True]


def test_volumes_by_hand() -> None:
    assert hypervolume([]) == 0
    assert hypervolume([(2, 3)]) == 6
    assert hypervolume([(2, 3)], reference=(1, 1)) == 2
    assert hypervolume([(2, 0)]) == 0
    # two boxes of 2 and 2 that share one of 1
    assert hypervolume([(2, 1, 1), (1, 2, 1)]) == 3
    assert sparsity([(1, 2)]) == 0


@given(sets)
def test_volume_counts_the_cells_that_are_dominated(points: list[tuple[int, int, int]]) -> None:
    cells = {
        (x, y, z) for p in points for x in range(p[0]) for y in range(p[1]) for z in range(p[2])
    }
    assert hypervolume(points) == len(cells)
    front = [point for point, kept in zip(points, on_front(points), strict=True) if kept]
    assert hypervolume(front) == len(cells)
