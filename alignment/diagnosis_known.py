"""What is known of a run while it is examined: its series by name, some made of others, and evidence taken from them.

A metric is a name. `a|b` is the first of them that is logged; `NAME` in it stands for what a rule goes through (one
reward after another). Some are made of others (`DERIVED`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from alignment.diagnosis_series import Series, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a metric was and is; `first` and `last` are the steps between which it went from one to the other."""

    metric: str
    before: float
    after: float
    first: int
    last: int

    @classmethod
    def of(cls, series: Series, before: Window, after: Window) -> Evidence:
        return cls(metric=series.name, before=before.value, after=after.value, first=before.first, last=after.last)

    def __str__(self) -> str:
        return f"{self.metric} {self.before:.4g} -> {self.after:.4g} (steps {self.first} to {self.last})"


Seen = tuple[Evidence, ...]


class Known:
    """What is known of a run.

    Args:
        series: metric -> its series.
        held_out: metrics that should rise with the reward and that the policy is not trained on.
        name: what `NAME` stands for.
    """

    def __init__(self, series: Mapping[str, Series], held_out: Sequence[str] = (), name: str = "") -> None:
        self._series, self.name = series, name
        self._made: dict[str, Series | None] = {}
        self.held_out = tuple(metric for metric in held_out if metric in series)

    def of(self, name: str) -> Known:
        """The same with `NAME` standing for this."""
        return Known(self._series, self.held_out, name)

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards."""
        means = [metric for metric in self._series if metric.startswith("rewards/") and metric.endswith("/mean")]
        return [metric.removeprefix("rewards/").removesuffix("/mean") for metric in means]

    def find(self, metric: str) -> Series | None:
        for one in metric.replace("NAME", self.name).split("|"):
            if one in self._series:
                return self._series[one]
            if one in DERIVED:
                if one not in self._made:
                    self._made[one] = DERIVED[one](self)
                if (made := self._made[one]) is not None:
                    return made
        return None

    def __getitem__(self, metric: str) -> Series:
        found = self.find(metric)
        assert found is not None, f"{metric} was to be asked for by `lacks`"
        return found

    def lacks(self, metric: str, points: int | None = None) -> tuple[str, ...]:
        """The metric, if it is missing or has fewer than so many points (None: as many as it takes)."""
        series = self.find(metric)
        if series is None:
            return (metric.replace("NAME", self.name),)
        needed = points or series.enough
        return (f"{needed} rows of {series.name}",) if len(series) < needed else ()


class Signal(Protocol):
    def lacks(self, known: Known) -> tuple[str, ...]:
        """Metrics that it needs and that are not there yet; none where it may be called."""
        ...

    def __call__(self, known: Known) -> Seen:
        """What it saw; nothing where it sees nothing."""
        ...


# ---------------------------------------------------------------------- made of other metrics


def _joined(known: Known, *metrics: str) -> tuple[np.ndarray, list[np.ndarray]] | None:
    """(the steps all of them have, their values there); None where one is missing or they share none."""
    found = [series for metric in metrics if (series := known.find(metric)) is not None]
    if len(found) < len(metrics):
        return None
    steps = found[0].steps
    for series in found[1:]:
        steps = np.intersect1d(steps, series.steps)
    # the last point at a step, where several rows have the same one
    values = [series.values[np.searchsorted(series.steps, steps, side="right") - 1] for series in found]
    return (steps, values) if len(steps) else None


def _smoothed(values: np.ndarray) -> np.ndarray:
    """[n] each the median of its five neighbours."""
    padded = np.pad(values, 2, mode="edge")
    found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    return found


def length_controlled(known: Known) -> Series | None:
    """The reward without what came from length: reward_t - sum_{s <= t} slope_s (length_s - length_{s-1}).

    The slope is that of the score on the length among completions of one prompt (`reward_length_slope`), so the sum is
    what the drift of the length has brought so far. In the sense of Dubois et al. 2024 (arXiv 2404.04475), which
    predicts the score at a fixed length; Singhal et al. 2023 (arXiv 2310.03716) find most of the gain of many runs to
    be length.
    """
    joined = _joined(known, "reward", "completions/mean_length", "reward_length_slope")
    if joined is None:
        return None
    steps, (reward, length, slope) = joined
    drift = np.diff(_smoothed(length), prepend=_smoothed(length)[:1])
    return Series.of("reward (length-controlled)", steps, reward - np.cumsum(_smoothed(slope) * drift))


def filled(known: Known) -> Series | None:
    """Mean length of the completions as a share of the longest."""
    joined = _joined(known, "completions/mean_length", "completions/max_length")
    if joined is None:
        return None
    steps, (mean, longest) = joined
    return Series.of("mean_length / max_length", steps, mean / np.maximum(longest, 1.0))


DERIVED: dict[str, Callable[[Known], Series | None]] = {
    "reward/length_controlled": length_controlled,
    "completions/filled": filled,
}
