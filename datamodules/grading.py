"""The stratum of each prompt, and how a measured success rate moves it.

`Grades` is the one thing about the order of a run that is not a pure function of (seed, epoch, position) when prompts
are re-graded: it goes into the checkpoint. It is the same on every rank, since every rank is fed the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from alignment.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Regrading:
    """Re-grading by the model's own success.

    Args:
        every: batches between gradings.
        rollouts: completions a prompt must have had since its last grading to be graded again.
        rates: falling success rates, one fewer than strata: (0.7, 0.3) makes a prompt easy from 0.7 on and hard below
            0.3.
        margin: how far beyond a rate a prompt must be to cross it, so that chance does not move it to and fro.
    """

    every: int
    rollouts: int
    rates: Sequence[float]
    margin: float

    def __post_init__(self) -> None:
        if self.every < 1 or self.rollouts < 1 or self.margin < 0:
            raise UserError(
                f"re-grading needs every and rollouts of at least 1 and a margin of at least 0, got {self.every}, "
                f"{self.rollouts} and {self.margin}"
            )
        falling = all(a - b >= 2 * self.margin for a, b in pairwise(self.rates))
        if not falling or not all(0 < rate < 1 for rate in self.rates):
            raise UserError(
                f"rates must fall, from below 1 to above 0, by at least twice the margin of {self.margin}; got "
                f"{list(self.rates)}"
            )

    def grade(self, labels: np.ndarray, rates: np.ndarray) -> np.ndarray:
        """[n] labels and success rates -> [n] labels: each moves as far as its rate is clearly across a bound."""
        bounds = np.asarray(self.rates)[None]
        hardest = (rates[:, None] < bounds + self.margin).sum(1)
        easiest = (rates[:, None] < bounds - self.margin).sum(1)
        graded: np.ndarray = np.clip(labels, easiest, hardest)
        return graded


class Grades:
    """Labels of the training prompts, and where the order that follows from them began.

    Args:
        labels: [n] stratum of each prompt, 0 the easiest.
        regrading: how labels move; None: never.

    Attributes:
        labels: [n] int64, changed in place by a grading.
        version: how often labels have changed.
        start: number of the batch from which on the labels are used, None until it is drawn.
        carry, start_carry: what the last batch drawn, and the last before `start`, left over of a seat, per stratum
            (see `datamodules.strata`).
    """

    def __init__(self, labels: Sequence[int] | np.ndarray, regrading: Regrading | None = None) -> None:
        self.labels = np.array(labels, dtype=np.int64)
        self.regrading = regrading
        self.version = 0
        self.start: int | None = 0
        self.carry: list[Fraction] | None = None
        self.start_carry: list[Fraction] | None = None
        self._batches = 0
        self._successes = np.zeros(len(self.labels))
        self._trials = np.zeros(len(self.labels), dtype=np.int64)

    def observe(self, positions: np.ndarray, successes: np.ndarray, trials: np.ndarray) -> None:
        """Take in one batch of all ranks: prompt `positions` had `trials` completions with `successes` in sum. Grades
        when it is time. Without `regrading` nothing follows from it."""
        if self.regrading is None:
            return
        np.add.at(self._successes, positions, successes)
        np.add.at(self._trials, positions, trials)
        self._batches += 1
        if self._batches % self.regrading.every == 0:
            self._grade(self.regrading)

    def _grade(self, regrading: Regrading) -> None:
        known = np.flatnonzero(self._trials >= regrading.rollouts)
        labels = regrading.grade(self.labels[known], self._successes[known] / self._trials[known])
        moved = bool((labels != self.labels[known]).any())
        self.labels[known] = labels
        self._successes[known], self._trials[known] = 0, 0
        if moved:
            self.version += 1
            self.start = None

    def begin(self, batch: int) -> None:
        """Batch number `batch` is the first that the present labels decide."""
        self.start, self.start_carry = batch, self.carry

    def state_dict(self) -> dict[str, Any]:
        """Nothing without `regrading`: the labels then follow from the data."""
        if self.regrading is None:
            return {}
        return {
            "labels": torch.from_numpy(self.labels.copy()),
            "successes": torch.from_numpy(self._successes.copy()),
            "trials": torch.from_numpy(self._trials.copy()),
            "batches": self._batches,
            "version": self.version,
            "start": self.start,
            "carry": _texts(self.carry),
            "start_carry": _texts(self.start_carry),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Raises UserError when the state is of other prompts."""
        if self.regrading is None or not state:
            return
        if len(state["labels"]) != len(self.labels):
            raise UserError(
                f"the checkpoint holds grades of {len(state['labels'])} prompts, the data have {len(self.labels)}"
            )
        self.labels[:] = state["labels"].numpy()
        self._successes[:] = state["successes"].numpy()
        self._trials[:] = state["trials"].numpy()
        self._batches, self.version, self.start = state["batches"], state["version"], state["start"]
        self.carry, self.start_carry = _fractions(state["carry"]), _fractions(state["start_carry"])


def _texts(numbers: list[Fraction] | None) -> list[str] | None:
    return None if numbers is None else [str(n) for n in numbers]


def _fractions(texts: list[str] | None) -> list[Fraction] | None:
    return None if texts is None else [Fraction(t) for t in texts]
