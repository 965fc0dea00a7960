"""An exponential that stays finite and keeps its slope."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXP_BOUND = 20.0


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) up to x = 20, from there on its tangent e^20 (x - 19): finite, and still with a slope.

    A clamp has no gradient beyond its bound, so a loss could never bring back a token that went that far.
    """
    return torch.where(x > EXP_BOUND, math.exp(EXP_BOUND) * (x - (EXP_BOUND - 1)), x.clamp(max=EXP_BOUND).exp())
