"""Pictures as figures, so that a test can look at what is on them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from unittest import mock

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BAR = "<colorbar>"
"""Label that matplotlib gives to the axes of a colour bar."""


def drawn(draw: Callable[[Path], None]) -> Figure:
    """The figure that `draw` would have saved, laid out."""
    with mock.patch.object(Figure, "savefig", autospec=True) as saved:
        draw(Path("unused.png"))
    figure = saved.call_args.args[0]
    FigureCanvasAgg(figure).draw()
    return figure


def panels_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() != BAR]


def bars_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() == BAR]


def texts_of(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def check_readable(figure: Figure) -> None:
    """No panel with its labels reaches into another or into the title, no tick label into the next one; nothing is cut
    off at the edge, and no picture is a long strip."""
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [text.get_window_extent() for text in figure.texts]
    for (i, a), (j, b) in combinations(enumerate(boxes), 2):
        assert not a.overlaps(b), (i, j)
    width, height = figure.get_size_inches()
    inside = figure.get_tightbbox()
    assert min(inside.x0, inside.y0) >= 0
    assert inside.x1 <= width
    assert inside.y1 <= height
    assert width / height < 4
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        shown = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        labels = [label for tick in shown for label in (tick.label1, tick.label2) if label.get_visible()]
        upright = [label.get_window_extent() for label in labels if not label.get_rotation()]
        assert not any(a.overlaps(b) for a, b in combinations(upright, 2)), [label.get_text() for label in labels]
