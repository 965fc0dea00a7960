"""What a run is worth. Fixed before any run was made, and not changed after one.

    n_k         mean reward k on the scale from 0 to 1, over the evaluations in the last half of the run
    overall     10 mean n_k ("am"), 10 (prod n_k)^(1/K) ("gm", the primary one), 10 min n_k
    stability   of the curve of gm / 10 over all evaluations: interquartile range of its differences, largest drawdown,
                CVaR 5 % of its drawdowns, collapse (its end below 0.8 of its peak)
    sensitivity of the score over a grid of settings: (max - mean) / max; over variants of the task besides, what tuning
                for each of them gains over one setting for all, on a scale of percentiles

Classes: stability is high with a mean drawdown of at most .05 and no collapse, medium up to .15 and one collapse in
ten, else low; sensitivity is low up to .05, medium up to .15, else high. Over seeds: the interquartile mean, and a
bootstrap of it. The measures of stability are those of Chan et al. 2020 (1912.05663), those over seeds of Agarwal et
al. 2021 (2108.13264).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 2000


def overall(shares: Sequence[float]) -> dict[str, float]:
    """`am`, `gm`, `min` of shares in [0, 1], from 0 to 10."""
    product = math.prod(shares)
    return {
        "am": 10 * statistics.mean(shares),
        "gm": 10 * product ** (1 / len(shares)),
        "min": 10 * min(shares),
    }


def last_half(curve: Sequence[float]) -> Sequence[float]:
    """The evaluations in the second half of a run."""
    return curve[len(curve) // 2 :]


def drawdowns(curve: Sequence[float]) -> list[float]:
    """How far each value lies below the best before it."""
    return [best - value for best, value in zip(np.maximum.accumulate(curve).tolist(), curve, strict=True)]


def stability(curve: Sequence[float]) -> dict[str, float]:
    """`iqr`, `drawdown`, `cvar`, `collapsed` (0 or 1) of one run's curve, and the `sd` of its last half."""
    falls = sorted(drawdowns(curve), reverse=True)
    worst = falls[: max(1, math.ceil(0.05 * len(falls)))]
    high, low = np.percentile(np.diff(curve), [75, 25]) if len(curve) > 1 else (0.0, 0.0)
    return {
        "iqr": float(high - low),
        "drawdown": falls[0],
        "cvar": statistics.mean(worst),
        "collapsed": float(curve[-1] < 0.8 * max(curve)),
        "sd": statistics.stdev(last) if len(last := last_half(curve)) > 1 else 0.0,
    }


def stability_class(drawdown: float, collapse_rate: float) -> str:
    if drawdown <= 0.05 and collapse_rate == 0:
        return "high"
    return "medium" if drawdown <= 0.15 and collapse_rate <= 0.1 else "low"


def within(scores: Sequence[float]) -> float:
    """Phi within: what is lost on average by a setting drawn from the grid, as a share of the best one's score."""
    best = max(scores)
    return (best - statistics.mean(scores)) / best if best > 0 else 0.0


def seed_noise(values: Sequence[float], cells: int, per_cell: int, seed: int = 0) -> float:
    """Phi within of a grid that changes nothing: every cell the mean of some seeds' scores."""
    draw = random.Random(seed)
    found = [
        within([statistics.mean(draw.choices(values, k=per_cell)) for _ in range(cells)]) for _ in range(RESAMPLES // 4)
    ]
    return statistics.mean(found)


def sensitivity_class(phi: float) -> str:
    return "low" if phi <= 0.05 else "medium" if phi <= 0.15 else "high"


def percentiles(values: Sequence[float], pool: Sequence[float]) -> list[float]:
    """On the scale where the 5th percentile of `pool` is 0 and its 95th is 1; 0 where these are the same."""
    low, high = np.percentile(pool, [5, 95])
    return [float((value - low) / (high - low)) if high > low else 0.0 for value in values]


def sensitivity(table: Sequence[Sequence[float]]) -> float:
    """Phi over tasks (rows) and settings (columns), each row among the `percentiles` of all methods: what tuning per
    task gains over one setting for all (Adkins et al. 2024, 2412.07165)."""
    each = statistics.mean(max(row) for row in table)
    return each - max(statistics.mean(column) for column in zip(*table, strict=True))


def runs_needed(scores: Sequence[float]) -> float:
    """How many settings of the grid, drawn one after the other, it takes on average to come within 5 % of the best."""
    near = sum(score >= 0.95 * max(scores) for score in scores)
    return (len(scores) + 1) / (near + 1)


def iqm(values: Sequence[float]) -> float:
    """Interquartile mean: of the middle half, the values at its borders by their share."""
    ordered, cut = sorted(values), len(values) / 4
    weights = [max(0.0, min(i + 1, len(values) - cut) - max(i, cut)) for i in range(len(values))]
    return sum(w * v for w, v in zip(weights, ordered, strict=True)) / sum(weights)


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the interquartile mean."""
    draw = random.Random(seed)
    means = [iqm(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float, float]:
    """Mean difference over the seeds both have, with a 95 % bootstrap interval."""
    return mean([ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))])


def mean(values: Sequence[float]) -> tuple[float, float, float]:
    """With a 95 % bootstrap interval."""
    draw = random.Random(0)
    means = [statistics.mean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return statistics.mean(values), float(low), float(high)
