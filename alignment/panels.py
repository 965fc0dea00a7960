"""Pictures of many small panels: how they are laid out, and axes that do not make much of little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

LEAST = 0.2
"""Shortest axis, as a share of the largest value on it: less would show noise as a trend."""


def panels(count: int, width: float = 3.4, height: float = 3.1) -> tuple[Figure, list[Axes]]:
    """(a figure, `count` panels of that size in inches, row by row): at most three side by side, four of over 6."""
    from matplotlib.figure import Figure  # imported where it is used: it takes a second
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(count, 3 if count <= 6 else 4)
    rows = math.ceil(count / columns)
    apart = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.06, hspace=0.06)
    figure = Figure(figsize=(width * columns + 0.6, height * rows), layout=apart)
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Of an axis for these values, NaN left out: at least `LEAST` of the largest wide, 1 where all are 0 or unknown."""
    known = [v for v in values if v == v]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    largest = max(abs(low), abs(high))
    width = max(1.1 * (high - low), LEAST * largest if largest else 1.0)
    middle = (low + high) / 2
    return middle - width / 2, middle + width / 2


def plain_axes(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """A panel for points: limits, few ticks, no frame at the top and at the right."""
    axes.set(xlim=limits(x), ylim=limits(y))
    axes.locator_params(nbins=5)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def some(labels: Sequence[Any], most: int = 8) -> dict[int, str]:
    """Position -> label of at most so many of them, evenly spread, for ticks that do not overlap."""
    stride = math.ceil(len(labels) / most) or 1
    return {i: str(labels[i]) for i in range(0, len(labels), stride)}


def colour_bar(
    figure: Figure, shown: ScalarMappable, axes: list[Axes], label: str, ticks: Locator | None = None
) -> None:
    """One for all of these panels, at their right."""
    bar = figure.colorbar(shown, ax=axes, shrink=0.8, ticks=ticks)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def whole_ticks() -> Locator:
    """Few ticks at whole numbers, for steps."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5, integer=True)


def diverging() -> Colormap:
    """Blue to red, grey where there is no value."""
    from matplotlib import colormaps

    return colormaps["coolwarm"].with_extremes(bad="0.92")
