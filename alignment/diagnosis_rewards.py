"""Signals that weigh one metric against another: a reward against its spread, its length or another reward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alignment.diagnosis_known import Evidence, Known, Seen
from alignment.diagnosis_series import Change, Series
from alignment.diagnosis_signals import DROP, EXACT


def learned(known: Known, metric: str = "reward", least: float = 0.0) -> Change | None:
    """The reward's rise, if it was learned: by at least the deviation that the scores of a prompt had at first, where
    that is known, by at least `least`, and still near its best. A policy that has learned its task has no entropy and
    no groups that differ, and nothing is wrong with it."""
    series, spread = known[metric], known.find("reward_std")
    change = series.change()
    deviation = spread.first.value if spread is not None and len(spread) >= spread.enough else 0.0
    kept = series.best.value - change.after.value <= 0.3 * max(change.size, 0.0)
    return change if change.rises and change.size >= max(deviation, least) and kept else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """The reward was not learned (see `learned`), and has not risen over the second half of the run. A rise by less
    than `least` is none."""

    metric: str = "reward"
    points: int | None = None
    least: float = 0.0

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric, self.points)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        late = series.late_change()
        if learned(known, self.metric, self.least) is not None or (late.rises and late.size >= self.least):
            return ()
        return (Evidence.of(series, series.first, series.last),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Still:
    """The metric has not risen since the beginning, by more than its noise."""

    metric: str = "reward"

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        return () if series.change().rises else (Evidence.of(series, series.first, series.last),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverges:
    """One metric falls from its best while the other one rises from what it was then: reward over-optimisation as in
    Gao et al. 2022 (arXiv 2210.10760). Both by more than their noise; the first by `DROP` of its scale (the size of its
    best, or the extent of the other one), the second by a tenth of its extent."""

    up: str
    down: str

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.up) + known.lacks(self.down)

    def __call__(self, known: Known) -> Seen:
        return diverges(known[self.up], known[self.down])


def diverges(up: Series, down: Series) -> Seen:
    """See `Diverges`."""
    best, now = down.best, down.last
    if best.value - now.value < DROP * max(abs(best.value), up.extent) or not down.between(best, now).falls:
        return ()
    then = up.until(best.last)
    rise = up.between(then, up.last)
    if rise.size < 0.1 * up.extent or not rise.rises:
        return ()
    return Evidence.of(down, best, now), Evidence.of(up, then, up.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The same for any of the metrics that the run names as held out."""

    up: str

    def lacks(self, known: Known) -> tuple[str, ...]:
        if not known.held_out:
            return ("a held-out reward",)
        missing = [known.lacks(metric) for metric in known.held_out]
        return known.lacks(self.up) + (() if () in missing else missing[0])

    def __call__(self, known: Known) -> Seen:
        there = [known[metric] for metric in known.held_out if not known.lacks(metric)]
        return next((seen for down in there if (seen := diverges(known[self.up], down))), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class FallsAgainst:
    """One metric falls, and by at least `share` of what the other one has risen."""

    metric: str
    other: str
    share: float

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric) + known.lacks(self.other)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        change, other = series.change(), known[self.other].change()
        if not change.falls or -change.size < self.share * max(other.size, 0.0):
            return ()
        return (Evidence.of(series, change.before, change.after),)


# ---------------------------------------------------------------------- one of several rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """All points are one value, up to rounding; with `value` this one."""

    metric: str
    value: float | None = None

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric)

    def __call__(self, known: Known) -> Seen:
        series = known[self.metric]
        low, high = float(series.values.min()), float(series.values.max())
        size = EXACT * max(1.0, abs(high))
        if high - low > size or (self.value is not None and abs(high - self.value) > size):
            return ()
        return (Evidence.of(series, series.first, series.last),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmoved:
    """From the first window to the last it has changed by at most a tenth of its deviation over a batch, which is not
    0, and within its noise; nor has it gone further than half of that deviation meanwhile."""

    metric: str
    deviation: str
    points: int

    def lacks(self, known: Known) -> tuple[str, ...]:
        return known.lacks(self.metric, self.points) + known.lacks(self.deviation)

    def __call__(self, known: Known) -> Seen:
        series, deviation = known[self.metric], known[self.deviation].last.value
        change = series.change()
        still = abs(change.size) <= 0.1 * deviation and not (change.rises or change.falls)
        small = deviation > EXACT and still and series.extent <= 0.5 * deviation
        return (Evidence.of(series, series.first, series.last),) if small else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersRise:
    """The mean of another reward has risen by at least half its deviation."""

    def lacks(self, known: Known) -> tuple[str, ...]:
        return () if len(known.rewards) > 1 else ("a second reward",)

    def __call__(self, known: Known) -> Seen:
        for name in known.rewards:
            other = known.of(name)
            mean, spread = other.find("rewards/NAME/mean"), other.find("rewards/NAME/std")
            if name == known.name or mean is None or spread is None or other.lacks("rewards/NAME/mean"):
                continue
            change = mean.change()
            if change.rises and change.size >= 0.5 * float(np.median(spread.values)):
                return (Evidence.of(mean, change.before, change.after),)
        return ()
