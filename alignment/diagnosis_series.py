"""Metrics over the rows of a log, bounded in memory, and what rules read of them: windows, noise, changes.

A row is what one logging window gave, or one evaluation. A series keeps at most `LIMIT` points, each the mean of as
many rows as it takes, so that a run of any length is seen whole; its last `TAIL` rows are kept besides as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LIMIT = 512
"""Points of a series; when they are full, neighbours are joined in pairs."""
TAIL = 64
"""Rows that are kept as they were logged."""
ENOUGH = 10
"""Points from which on a series of training rows says something."""
FEW = 6
"""The same for evaluations, of which a run has fewer."""
CHECKS = 1
"""The same for comparisons of the ranks, which are exact."""
SMALLEST, LARGEST = 5, 20
"""Points of a window: a fifth of the series, within these bounds."""
SIGNIFICANT = 4.0
"""Standard errors from which on a change counts. The noise of a series is estimated from neighbouring points, which is
too little where these depend on each other; hence not 2 or 3."""
EVALUATIONS, RANKS = "val/", "ranks/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some neighbouring points: their median, the steps of the first and the last, and how many they are."""

    value: float
    first: int
    last: int
    points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From one window to a later one; `errors`: the difference in standard errors."""

    before: Window
    after: Window
    errors: float

    @property
    def size(self) -> float:
        return self.after.value - self.before.value

    @property
    def rises(self) -> bool:
        return self.errors >= SIGNIFICANT

    @property
    def falls(self) -> bool:
        return self.errors <= -SIGNIFICANT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One metric.

    Args:
        name: of it. steps, values: [n] of its points, in the order of the log.
        tail_steps, tail_values: of its last rows.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray
    tail_steps: np.ndarray
    tail_values: np.ndarray

    @classmethod
    def of(cls, name: str, steps: Any, values: Any) -> Series:
        """A series whose points are rows."""
        at, found = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
        return cls(name=name, steps=at, values=found, tail_steps=at[-TAIL:], tail_values=found[-TAIL:])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def enough(self) -> int:
        """Points that it takes."""
        base = self.name.removeprefix("-")
        return FEW if base.startswith(EVALUATIONS) else CHECKS if base.startswith(RANKS) else ENOUGH

    @property
    def width(self) -> int:
        """Points of a window: a fifth within bounds, a third of a short series of evaluations, one comparison."""
        if self.enough == CHECKS:
            return 1
        if len(self) < ENOUGH:
            return max(1, len(self) // 3)
        return min(max(len(self) // 5, SMALLEST), LARGEST)

    def at(self, start: int, stop: int) -> Window:
        """The window of the points from `start` up to before `stop`."""
        values = self.values[start:stop]
        steps = self.steps[start:stop]
        return Window(value=float(np.median(values)), first=int(steps[0]), last=int(steps[-1]), points=len(values))

    def window(self, back: int = 0) -> Window | None:
        """The last window, or the `back`-th before it; None before the beginning."""
        stop = len(self) - back * self.width
        return self.at(stop - self.width, stop) if stop >= self.width else None

    @property
    def last(self) -> Window:
        return self.at(len(self) - self.width, len(self))

    @property
    def first(self) -> Window:
        """The smallest window at the beginning: most runs learn fast at first."""
        return self.at(0, min(self.width, SMALLEST))

    @property
    def noise(self) -> float:
        """Standard deviation of a point about its trend: by the median size of the steps between neighbours, so that
        neither a trend nor an outlier counts as noise."""
        if len(self) < 3:
            return 0.0
        steps = np.diff(self.values)
        return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / math.sqrt(2))

    def change(self) -> Change:
        """From the first window to the last."""
        return self.between(self.first, self.last)

    def late_change(self) -> Change:
        """From the window in the middle of the series to the last."""
        start = (len(self) - self.width) // 2
        return self.between(self.at(start, start + self.width), self.last)

    def between(self, before: Window, after: Window) -> Change:
        # The variance of a median is pi / 2 of the mean's.
        error = self.noise * math.sqrt(math.pi / 2 * (1 / before.points + 1 / after.points))
        size = after.value - before.value
        errors = size / error if error > 0 else math.copysign(math.inf, size) if size else 0.0
        return Change(before=before, after=after, errors=errors)

    @property
    def levels(self) -> np.ndarray:
        """[n - width + 1] the medians of all windows, from the first on."""
        found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(self.values, self.width), axis=1)
        return found

    @property
    def best(self) -> Window:
        """The highest window."""
        start = int(self.levels.argmax())
        return self.at(start, start + self.width)

    @property
    def lowest(self) -> Window:
        """The lowest window."""
        start = int(self.levels.argmin())
        return self.at(start, start + self.width)

    @property
    def extent(self) -> float:
        """Highest window minus lowest."""
        return self.best.value - self.lowest.value

    def until(self, step: int) -> Window:
        """The window that ends at the last point up to a step; the first one where there is none yet."""
        stop = int(np.searchsorted(self.steps, step, side="right"))
        return self.at(max(stop, self.width) - self.width, max(stop, self.width))


class Track:
    """A series while it grows."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.tail: list[tuple[int, float]] = []
        self.stride = 1  # rows of a point
        self.held: list[float] = []  # rows that are no point yet

    def add(self, step: int, value: float) -> None:
        self.tail = [*self.tail[1 - TAIL :], (step, value)]
        self.held.append(value)
        if len(self.held) < self.stride:
            return
        self.steps.append(step)
        self.values.append(math.fsum(self.held) / self.stride)
        self.held = []
        if len(self.values) == LIMIT:
            self.steps = self.steps[1::2]
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self.stride *= 2

    def series(self, name: str) -> Series:
        return Series(
            name=name,
            steps=np.asarray(self.steps, dtype=np.int64),
            values=np.asarray(self.values, dtype=np.float64),
            tail_steps=np.asarray([step for step, _ in self.tail], dtype=np.int64),
            tail_values=np.asarray([value for _, value in self.tail], dtype=np.float64),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "values": list(self.values),
            "tail": [list(row) for row in self.tail],
            "stride": self.stride,
            "held": list(self.held),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Track:
        """Inverse of `state_dict`."""
        track = cls()
        track.steps, track.values = [int(s) for s in state["steps"]], [float(v) for v in state["values"]]
        track.tail = [(int(step), float(value)) for step, value in state["tail"]]
        track.stride, track.held = int(state["stride"]), [float(v) for v in state["held"]]
        return track


class History:
    """The series of a run while it grows. Values that are not finite are left out: what they say is another matter."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._tracks.setdefault(name, Track()).add(step, float(value))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tracks)

    def series(self) -> dict[str, Series]:
        return {name: track.series(name) for name, track in self._tracks.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: track.state_dict() for name, track in self._tracks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tracks = {name: Track.of(saved) for name, saved in state.items()}
