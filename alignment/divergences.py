"""f-divergences in place of DPO's reverse KL: Wang et al. 2023 (arXiv 2309.16240).

Under a penalty D_f of the policy from the reference, the reward that a policy stands for is beta f'(pi / pi_ref) plus
what depends on the prompt alone. So c and j, the log-ratios, become f'(e^c) and f'(e^j), up to a constant that makes
them 0 where policy and reference agree:

reverse_kl   c
forward_kl   1 - e^-c
js           log 2 + log sigmoid(c), Jensen-Shannon
alpha        (e^((a - 1) c) - 1) / (a - 1); a = 1 is reverse_kl

Only for losses in which what depends on the prompt cancels: those of differences. Exponentials are continued linearly
beyond an exponent of 20.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from alignment.bounded import bounded_exp
from alignment.errors import UserError
from alignment.pair_losses import PairLogRatios

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

DIVERGENCES: tuple[Divergence, ...] = ("reverse_kl", "forward_kl", "js", "alpha")


def check_divergence(divergence: str, alpha: float) -> None:
    """Raise UserError for a name or an alpha that there is not."""
    if divergence not in DIVERGENCES:
        raise UserError(f"divergence '{divergence}' is not known; use {', '.join(DIVERGENCES)}")
    if not math.isfinite(alpha):
        raise UserError(f"divergence_alpha is {alpha}; it must be a number")


def score(log_ratios: Tensor, divergence: Divergence, alpha: float = 0.5) -> Tensor:
    """[P] log(pi / pi_ref) -> [P] what stands for it under a divergence; `alpha` is that of `alpha`."""
    if divergence == "forward_kl":
        return 1 - bounded_exp(-log_ratios)
    if divergence == "js":
        return math.log(2) + F.logsigmoid(log_ratios)
    if divergence == "alpha" and abs(alpha - 1) > 1e-6:  # nearer to its limit, rounding would be all that is left
        return (bounded_exp((alpha - 1) * log_ratios) - 1) / (alpha - 1)
    return log_ratios


def under(pairs: PairLogRatios, divergence: Divergence, alpha: float) -> PairLogRatios:
    """The pairs with both log-ratios replaced by their scores."""
    if divergence == "reverse_kl":
        return pairs
    return replace(
        pairs, chosen=score(pairs.chosen, divergence, alpha), rejected=score(pairs.rejected, divergence, alpha)
    )
