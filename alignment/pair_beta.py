"""Beta of one batch of preference pairs, and which of its pairs count: beta-DPO (Wu et al. 2024, arXiv 2407.08639).

    gap = delta of a pair, without gradient        M <- m M + (1 - m) mean gap        S <- m S + (1 - m) std gap
    kept: a share 1 - drop of the pairs, drawn without replacement with weights exp(-((gap - M) / S)^2 / 2)
    factor on beta: 1 + alpha (mean gap of those kept - M)

Deviations: the moving averages begin at the first batch's values; the authors' begin at 0, which makes the first
batches' weights nearly 0 and their beta large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from alignment.errors import UserError
from alignment.randomness import derive


@dataclass(kw_only=True)
class PairBeta:
    """The moving averages and what follows from them.

    Args:
        alpha: how strongly beta follows the gaps, per nat. drop: share of the pairs left out.
        momentum: share of the old value in the moving averages.
    """

    alpha: float = 0.6
    drop: float = 0.2
    momentum: float = 0.9
    mean: float | None = None
    deviation: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.alpha < math.inf and 0 <= self.drop < 1 and 0 <= self.momentum < 1):
            raise UserError(
                f"beta-DPO needs an alpha of at least 0, and drop and momentum of at least 0 and below 1, got "
                f"{self.alpha}, {self.drop} and {self.momentum}"
            )

    def update(self, gaps: Sequence[float]) -> None:
        """Take in the gaps of a batch, over all ranks: at least one, all finite."""
        mean, deviation = fmean(gaps), stdev(gaps) if len(gaps) > 1 else 0.0
        if self.mean is None or self.deviation is None:
            self.mean, self.deviation = mean, deviation
            return
        self.mean = self.momentum * self.mean + (1 - self.momentum) * mean
        self.deviation = self.momentum * self.deviation + (1 - self.momentum) * deviation

    def weights(self, gaps: Sequence[float]) -> list[float]:
        """What each pair is drawn with; 1 for all where the gaps have had no spread."""
        return [math.exp(-distance) for distance in self._distances(gaps)]

    def _distances(self, gaps: Sequence[float]) -> list[float]:
        """Minus the logarithm of each weight."""
        assert self.mean is not None, "update first"
        spread = self.deviation or math.inf
        return [0.5 * ((gap - self.mean) / spread) ** 2 for gap in gaps]

    def keep(self, gaps: Sequence[float], seed: int, step: int, names: Sequence[int]) -> list[int]:
        """Places of the pairs kept, rising; one at least.

        Each pair's chance depends on (seed, step, its name) alone: with exponential clocks of rates `weights`, those
        that ring first are a draw without replacement.
        """
        count = max(1, math.floor((1 - self.drop) * len(gaps) + 1e-9))
        rings = []  # log(clock / weight), since the weight of a gap far from the mean would be 0 as a float
        for distance, name in zip(self._distances(gaps), names, strict=True):
            clock = np.random.default_rng(derive(seed, "beta-dpo", step, name)).standard_exponential()
            rings.append(math.log(clock) + distance)
        return sorted(sorted(range(len(gaps)), key=lambda i: (rings[i], i))[:count])

    def factor(self, kept: Sequence[float]) -> float:
        """On beta, from the gaps of the pairs kept. It may be below 0: the caller bounds beta."""
        assert self.mean is not None
        return 1 + self.alpha * (fmean(kept) - self.mean)

    def state_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean, "deviation": self.deviation}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.mean, self.deviation = state["mean"], state["deviation"]
