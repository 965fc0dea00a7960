"""How long gradients are beside each other, and what would put them right.

    dev_k = (n_k / rho_k) / mean_j (n_j / rho_j)                    1 where the lengths are as wanted
    s_k   = rho_k (sum n / sum rho) / n_k, between 1/2 and 2        1 for a gradient without a length

n_k is a moving average of |g_k|, rho_k the share of the length that gradient k should have. s_k is GradNorm's aim
(arXiv 1711.02257) without its optimiser; nothing is differentiated through it.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, float)

EMA = 0.9
LOWEST, HIGHEST = 0.5, 2.0


def averaged(before: T | None, now: T, ema: float = EMA) -> T:
    """The moving average with one measurement more; the first one is its start."""
    return now if before is None else ema * before + (1 - ema) * now


def deviations(norms: Tensor, ratio: Tensor) -> Tensor:
    """[K] lengths, [K] wanted shares -> [K] dev; 0 where nothing has a length."""
    relative = norms / ratio
    return relative / relative.mean().clamp(min=1e-300)


def factors(norms: Tensor, ratio: Tensor) -> Tensor:
    """[K] lengths, [K] wanted shares -> [K] s."""
    wanted = ratio * norms.sum() / ratio.sum()
    return torch.where(norms > 0, (wanted / norms).clamp(LOWEST, HIGHEST), 1.0)
