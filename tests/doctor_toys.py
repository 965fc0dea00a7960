"""Logs made by hand for the doctor: curves with a little noise, and what rules say of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from alignment.diagnosis import Examination

DATA = Path(__file__).parent / "data"
Curve = float | Callable[[float], float]


def noisy(curve: Curve, rows: int, noise: float, seed: int) -> list[float]:
    """[rows] a curve over the share of the run that is over, and noise of this deviation."""
    draw = np.random.default_rng(seed).normal(size=rows) * noise
    return [(curve(i / (rows - 1)) if callable(curve) else curve) + float(draw[i]) for i in range(rows)]


def log(rows: int = 40, noise: float = 0.01, **curves: Curve) -> list[tuple[int, dict[str, float]]]:
    """Rows of training at steps 0, 1, ...; `__` in a name stands for `/`. Noise is in units of the curve's name: the
    same for all."""
    found = {
        name.replace("__", "/"): noisy(curve, rows, noise, seed) for seed, (name, curve) in enumerate(curves.items())
    }
    return [(step, {name: values[step] for name, values in found.items()}) for step in range(rows)]


def with_evaluations(
    rows: list[tuple[int, dict[str, float]]], every: int, **curves: Curve
) -> list[tuple[int, dict[str, float]]]:
    """The same with an evaluation after every so many rows."""
    out, count = [], len(rows) // every
    for step, values in rows:
        out.append((step, values))
        if step % every == every - 1:
            share = (step // every) / max(1, count - 1)
            found = {f"val/{n.replace('__', '/')}": c(share) if callable(c) else c for n, c in curves.items()}
            out.append((step, found))
    return out


def examined(rows: Any, every: int = 10, held_out: tuple[str, ...] = ()) -> Examination:
    examination = Examination(every, held_out)
    for step, values in rows:
        examination.add(step, values)
    examination.finish()
    return examination


def alarms(rows: Any, **settings: Any) -> set[str]:
    """Names of the rules that gave an alarm."""
    return {alarm.rule for alarm in examined(rows, **settings).alarms}


def recorded(name: str) -> list[tuple[int, dict[str, float]]]:
    """Rows of a real run, kept under tests/data by `python -m benchmarks.doctor --keep`."""
    return [(step, values) for step, values in json.loads((DATA / f"{name}.json").read_text())["rows"]]


def up(start: float, end: float) -> Callable[[float], float]:
    """A learning curve: fast at first, nearly there after half the run."""
    return lambda t: end + (start - end) * math.exp(-6 * t)


def line(start: float, end: float) -> Callable[[float], float]:
    return lambda t: start + (end - start) * t


def merged(*logs: list[tuple[int, Mapping[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    """Logs of the same steps as one."""
    return [(rows[0][0], {k: v for _, values in rows for k, v in values.items()}) for rows in zip(*logs, strict=True)]
