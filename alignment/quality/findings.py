"""What a check has found, and what several checks need."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment.errors import UserError
from alignment.quality.settings import Limit, Verdict

_MOST_BARS = 10


@dataclass(kw_only=True)
class Faults:
    """Rows at fault in one way: how many exactly, and where the first `show` of them are."""

    what: str
    show: int
    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if len(self.places) < self.show:
            self.places.append(place)

    def __str__(self) -> str:
        more = ", ..." if self.places and self.count > len(self.places) else ""
        return f"{self.what}: {self.count:,}" + (f" ({', '.join(self.places)}{more})" if self.places else "")


@dataclass(kw_only=True)
class Finding:
    """What one check measured.

    Args:
        check: its name, a key of `settings.LIMITS`.
        measured: one line for people.
        value: the number that the limit is for; None where it cannot be measured.
        limit: the limit in force.
        advice: what to do about it; shown where the verdict is not `ok`.
        figures: numbers and words for machines.
        histogram: bars for people, label -> count.
        faults: rows at fault, by kind.
    """

    check: str
    measured: str
    limit: Limit
    value: float | None = None
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    histogram: dict[str, int] = field(default_factory=dict)
    faults: list[Faults] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return self.limit.verdict(self.value)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "value": self.value,
            "warn": self.limit.warn,
            "fail": self.limit.fail,
            "measured": self.measured,
            "advice": self.advice,
            "figures": self.figures,
            "histogram": self.histogram,
            "faults": [{"what": f.what, "count": f.count, "rows": f.places} for f in self.faults if f.count],
        }


def needed(package: str, check: str) -> Any:
    """A module of the extra `rewards`. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"the check {check} needs the package {package}: pip install 'lightning-alignment[rewards]', or leave the "
            f"check out with --skip {check}"
        ) from error


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927); (0, 1) of no trials. Half successes are ties."""
    if trials == 0:
        return 0.0, 1.0
    z = 1.959964
    share = successes / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def share(part: float, whole: int) -> float:
    """part / whole, 0 of nothing."""
    return part / whole if whole else 0.0


def percent(value: float) -> str:
    """A share for people; what is there is never 0 %, and what is missing leaves no 100 %."""
    if 0 < value < 0.001:
        return "<0.1%"
    return ">99.9%" if 0.999 < value < 1 else f"{value:.1%}"


def bars(values: Sequence[int]) -> dict[str, int]:
    """How often each whole number occurs, in order; large ones in one bar."""
    counts = Counter(min(value, _MOST_BARS) for value in values)
    return {(f"{n} or more" if n == _MOST_BARS else str(n)): counts[n] for n in sorted(counts)}
