"""Layout and axes of pictures with many panels, by hand."""

from __future__ import annotations

import math

import pytest

from alignment.panels import limits, panels, some


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0], (-0.5, 0.5)),
        ([math.nan], (-0.5, 0.5)),
        ([0.5, math.nan], (0.45, 0.55)),  # a fifth of 0.5 wide
        ([-10.0], (-11.0, -9.0)),
        ([0.95, 0.99], (0.871, 1.069)),  # a fifth of 0.99 around 0.97
        ([0.0, 1.0], (-0.05, 1.05)),
    ],
)
def test_limits(values: list[float], expected: tuple[float, float]) -> None:
    assert limits(values) == pytest.approx(expected)


def test_some_labels() -> None:
    assert some([5, 6, 7]) == {0: "5", 1: "6", 2: "7"}
    assert some(list(range(20)), 8) == {i: str(i) for i in range(0, 20, 3)}
    assert some([]) == {}


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 1)), (3, (1, 3)), (5, (2, 3)), (6, (2, 3)), (7, (2, 4)), (12, (3, 4))]
)
def test_the_grid(count: int, shape: tuple[int, int]) -> None:
    figure, axes = panels(count)
    assert len(axes) == len(figure.axes) == count
    spec = axes[0].get_gridspec()
    assert (spec.nrows, spec.ncols) == shape
