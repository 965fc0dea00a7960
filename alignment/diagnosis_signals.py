"""Signals that rules are made of: pure functions from the series of a run to what they saw.

A signal is called with what is known of a run and returns its evidence, nothing where it sees nothing. `lacks` names
the metrics it would need and that are not there, or have too few points yet; a signal that lacks one is not called.
Those that weigh one metric against another are in `alignment.diagnosis_rewards`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alignment.diagnosis_known import Evidence, Known, Seen, Signal
from alignment.diagnosis_series import Series

DROP = 0.15
"""Share of its scale by which a quantity falls short of its best before that counts: rldoctor's gap between reward and
held-out reward (0.15 warns, 0.30 is critical)."""
SPIKE = 10.0
"""A value so many times its usual size, or so many deviations above it, is a spike: stabilityguard's factor on a moving
average; Lightning's SpikeDetection compares with one too."""
USUAL = 20
"""Rows before a spike that say what is usual."""
EXACT = 1e-6
"""Relative range within which values are one (`alignment.advantages.FLAT`)."""


# ---------------------------------------------------------------------- levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """The last window is above a limit; with `windows` 2 the one before it too."""

    metric: str
    limit: float
    windows: int = 1

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        levels = [series.window(back) for back in range(self.windows)]
        high = all(level is not None and level.value > self.limit for level in levels)
        return (Evidence.of(series, series.first, series.last),) if high else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """The last window is below a limit."""

    metric: str
    limit: float
    points: int | None = None

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric, self.points)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        return (Evidence.of(series, series.first, series.last),) if series.last.value < self.limit else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """The last window is within `distance` of a value."""

    metric: str
    value: float
    distance: float

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        near = abs(series.last.value - self.value) <= self.distance
        return (Evidence.of(series, series.first, series.last),) if near else ()


# ---------------------------------------------------------------------- changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rises:
    """From the first window to the last, by more than its noise, by at least `by` and to at least `factor` times."""

    metric: str
    by: float = 0.0
    factor: float = 1.0

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        change = series.change()
        large = change.size >= self.by and change.after.value >= self.factor * change.before.value
        return (Evidence.of(series, change.before, change.after),) if change.rises and large else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Falls:
    """From the first window to the last, by more than its noise, and to at most `factor` times."""

    metric: str
    factor: float = 1.0

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        change = series.change()
        small = change.after.value <= self.factor * change.before.value
        return (Evidence.of(series, change.before, change.after),) if change.falls and small else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrows:
    """The last `windows` windows are at least `factor` times the lowest one before them."""

    metric: str
    factor: float
    windows: int = 1

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        lowest = series.lowest
        levels = [series.window(back) for back in range(self.windows)]
        high = all(w is not None and w.first > lowest.last and w.value >= self.factor * lowest.value for w in levels)
        return (Evidence.of(series, lowest, series.last),) if high and series.between(lowest, series.last).rises else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """The last window falls short of the best one by more than its noise and by `DROP` of its scale: the size of the
    best, or the extent of the whole series if that is larger."""

    metric: str

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        best, last = series.best, series.last
        large = best.value - last.value >= DROP * max(abs(best.value), series.extent)
        return (Evidence.of(series, best, last),) if large and series.between(best, last).falls else ()


# ---------------------------------------------------------------------- single rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """One of the last `USUAL` rows is far above the `USUAL` before it in every metric: in the first by `SPIKE` robust
    deviations, in the others `SPIKE` times. With `rows` 2 of a single metric two rows in a row are."""

    metrics: tuple[str, ...]
    rows: int = 1

    def lacks(self, known: Known) -> tuple[str, ...]:
        return tuple(name for metric in self.metrics for name in known.lacks(metric, USUAL + self.rows))

    def __call__(self, known: Known) -> Seen:
        all_series = [known[metric] for metric in self.metrics]
        spikes = [_spikes(series, relative=i > 0) for i, series in enumerate(all_series)]
        shared = sorted(set.intersection(*(set(found) for found in spikes)))
        steps = all_series[0].tail_steps.tolist()
        for step in shared:
            run = steps[steps.index(step) : steps.index(step) + self.rows]
            if len(run) == self.rows and all(s in shared for s in run):
                return tuple(found[step] for found in spikes)
        return ()


def _spikes(series: Series, *, relative: bool) -> dict[int, Evidence]:
    """Step -> evidence of each recent row that is one."""
    found = {}
    values, steps = series.tail_values, series.tail_steps
    for at in range(max(USUAL, len(values) - USUAL), len(values)):
        before = values[at - USUAL : at]
        usual = float(np.median(before))
        deviation = 1.4826 * float(np.median(np.abs(before - usual)))
        limit = SPIKE * abs(usual) if relative else usual + SPIKE * max(deviation, EXACT * abs(usual))
        if values[at] > limit:
            step = int(steps[at])
            found[step] = Evidence(
                metric=series.name, before=usual, after=float(values[at]), first=int(steps[at - USUAL]), last=step
            )
    return found


# ---------------------------------------------------------------------- several together


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The first of them that sees something, among those whose metrics are there."""

    signals: tuple[Signal, ...]

    def lacks(self, known: Known) -> tuple[str, ...]:
        missing = [signal.lacks(known) for signal in self.signals]
        return () if () in missing else (" or ".join(" and ".join(names) for names in missing),)

    def __call__(self, known: Known) -> Seen:
        there = (signal for signal in self.signals if not signal.lacks(known))
        return next((seen for signal in there if (seen := signal(known))), ())


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of them see something."""

    signals: tuple[Signal, ...]

    def lacks(self, known: Known) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for signal in self.signals for name in signal.lacks(known)))

    def __call__(self, known: Known) -> Seen:
        seen = [signal(known) for signal in self.signals]
        return tuple(evidence for part in seen for evidence in part) if all(seen) else ()


def any_of(*signals: Signal) -> AnyOf:
    return AnyOf(signals)


def all_of(*signals: Signal) -> AllOf:
    return AllOf(signals)
