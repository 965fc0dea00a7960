"""Weights of a mixture of models."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alignment.errors import UserError


def mixture(weights: Sequence[float] | None, count: int) -> list[float]:
    """The share of each of `count` models; None: equal ones. Raises UserError for fewer than two models, or for weights
    that are no shares."""
    if count < 2:
        raise UserError(f"a soup is made of at least two models, got {count}")
    shares = [1 / count] * count if weights is None else [float(w) for w in weights]
    if len(shares) != count:
        raise UserError(f"{len(shares)} weights for {count} models; give one for each")
    if not all(0 <= w <= 1 for w in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        given = ", ".join(f"{w:g}" for w in shares)
        raise UserError(f"weights {given} are no mixture: each is between 0 and 1, and they sum to 1")
    return shares
