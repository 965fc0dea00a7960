"""Coefficients that follow a measurement: of the KL, of the entropy. Their state belongs in the checkpoint.

A controller is fed numbers that are the same on every rank; one that is not finite is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from alignment.errors import UserError

State = dict[str, float | bool | None]

BOUNDS = (1e-8, 1e8)
"""Of a coefficient that follows a KL: a target out of reach would take it to 0 or to infinity."""


class KLController(Protocol):
    """Holds the KL coefficient."""

    coefficient: float

    def update(self, kl: float, samples: int) -> None:
        """Take in a measured KL (nats, always of one kind: per completion or per token) of `samples` completions."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, float | bool | None]) -> None: ...


@dataclass(kw_only=True)
class FixedKL:
    """A coefficient that stays.

    Args:
        coefficient: at least 0.
    """

    coefficient: float

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < math.inf:
            raise UserError(f"the KL coefficient is {self.coefficient}; it must be at least 0, and finite")

    def update(self, kl: float, samples: int) -> None:
        """Nothing follows from it."""

    def state_dict(self) -> State:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float | bool | None]) -> None:
        self.coefficient = _number(state["coefficient"])


@dataclass(kw_only=True)
class AdaptiveKL:
    """beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) samples / horizon). Ziegler et al. 2019 (arXiv 1909.08593).

    A batch of more samples than `horizon` counts as `horizon`: one measurement moves beta by at most 20 %. It stays
    within `BOUNDS`.

    Args:
        coefficient: beta at the start, above 0.
        target: the KL to hold, in nats: per completion as in the paper (6), or per token as in verl (0.1). What is
            measured must be of the same kind.
        horizon: completions over which an error of one clips to a change of 20 %.
        ema: share of the old value in a moving average of the measured KL; 0 feeds each measurement as it is.
    """

    coefficient: float = 0.2
    target: float = 6.0
    horizon: int = 10_000
    ema: float = 0.0
    smoothed: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.coefficient < math.inf and 0 < self.target < math.inf and self.horizon > 0):
            raise UserError(
                f"an adaptive KL needs coefficient, target and horizon above 0, and finite, got {self.coefficient}, "
                f"{self.target} and {self.horizon}"
            )
        if not 0 <= self.ema < 1:
            raise UserError(f"ema is {self.ema}; it must be at least 0 and below 1")

    def update(self, kl: float, samples: int) -> None:
        """Take in the mean KL of `samples` completions."""
        if not math.isfinite(kl):
            return
        self.smoothed = kl if self.smoothed is None else self.ema * self.smoothed + (1 - self.ema) * kl
        error = min(max(self.smoothed / self.target - 1, -0.2), 0.2)
        moved = self.coefficient * (1 + error * min(samples / self.horizon, 1.0))
        self.coefficient = min(max(moved, BOUNDS[0]), BOUNDS[1])

    def state_dict(self) -> State:
        return {"coefficient": self.coefficient, "smoothed": self.smoothed}

    def load_state_dict(self, state: Mapping[str, float | bool | None]) -> None:
        self.coefficient = _number(state["coefficient"])
        self.smoothed = None if state["smoothed"] is None else _number(state["smoothed"])


@dataclass(kw_only=True)
class AdaptiveEntropy:
    """An entropy bonus that grows while the entropy is at or below its target, and acts only then. Skywork-OR1, He et
    al. 2025 (arXiv 2505.22312).

    Args:
        target: mean token entropy to hold, in nats.
        step: change of the coefficient per measurement.
        largest: bound of the coefficient; the smallest is 0.
        value: the coefficient at the start.
    """

    target: float
    step: float = 0.005
    largest: float = 1.0
    value: float = 0.0
    low: bool = False

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.step > 0 and 0 <= self.value <= self.largest):
            raise UserError(
                f"an adaptive entropy bonus needs target and step above 0 and its value between 0 and {self.largest}, "
                f"got {self.target}, {self.step} and {self.value}"
            )

    @property
    def coefficient(self) -> float:
        """What to multiply the entropy with now: 0 unless the last measurement was at or below the target."""
        return self.value if self.low else 0.0

    def update(self, entropy: float) -> None:
        """Take in the mean token entropy of a rollout, in nats."""
        if not math.isfinite(entropy):
            return
        self.low = entropy <= self.target
        self.value = min(max(self.value + (self.step if self.low else -self.step), 0.0), self.largest)

    def state_dict(self) -> State:
        return {"value": self.value, "low": self.low}

    def load_state_dict(self, state: Mapping[str, float | bool | None]) -> None:
        self.value, self.low = _number(state["value"]), bool(state["low"])


@dataclass(kw_only=True)
class Plateau:
    """Says when a score has stopped getting better: `patience` measurements in a row without a new best, and again
    after as many more. The best stays what it is.

    Args:
        patience: measurements. min_delta: a score this much above the best one is better.
    """

    patience: int = 3
    min_delta: float = 0.0
    best: float | None = None
    bad: int = 0

    def __post_init__(self) -> None:
        if self.patience < 1 or not 0 <= self.min_delta < math.inf:
            raise UserError(
                f"a plateau needs a patience of at least 1 and a min_delta of at least 0, got {self.patience} and "
                f"{self.min_delta}"
            )

    def update(self, score: float) -> bool:
        """Take in a score, more is better. Whether there is a plateau."""
        if not math.isfinite(score):
            return False
        if self.best is None or score > self.best + self.min_delta:
            self.best, self.bad = score, 0
            return False
        self.bad += 1
        if self.bad < self.patience:
            return False
        self.bad = 0
        return True

    def state_dict(self) -> State:
        return {"best": self.best, "bad": float(self.bad)}

    def load_state_dict(self, state: Mapping[str, float | bool | None]) -> None:
        self.best = None if state["best"] is None else _number(state["best"])
        self.bad = int(_number(state["bad"]))


def _number(value: float | bool | None) -> float:
    assert value is not None, "a controller's state holds a number here"
    return float(value)
