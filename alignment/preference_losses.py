"""Losses of the preference family beside DPO's own, one value per pair and nothing averaged (`alignment.losses`).

With c and j the log-ratios of the chosen and the rejected completion, delta = c - j:

name        value                                                                           beta in the paper
exo         KL(p || [1 - e, e]), p = [sigmoid(beta delta), sigmoid(-beta delta)]            0.1
nca         -log s(beta c) - log s(-beta c) / 2 - log s(-beta j) / 2                        0.01
bco_pair    -log s(beta c) - log s(-beta j)                                                 0.01
sppo_hard   (c - 1 / (2 beta))^2 + (j + 1 / (2 beta))^2                                     0.001
apo_zero    1 - s(beta c) + s(beta j)                                                       0.1
apo_down    s(beta c) + 1 - s(beta delta)                                                   0.1
discopop    (1 - m) log(1 + e^-x) + m e^-x,  x = beta delta, m = s(x / tau)                 0.05
simpo       -log s(beta (mean log-prob of chosen - of rejected) - gamma)                    2.0
orpo        -beta log s(log-odds of chosen - of rejected), odds of the mean log-prob        0.1

s is the sigmoid. simpo and orpo have no reference: their c and j are log-probs of the policy, and their beta is that of
their modules. That of the others is the default in each signature. `docs/preferences.md` says when to use which, and
where each number is from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.bounded import bounded_exp
from alignment.pair_losses import PairLogRatios, dpo_loss, smoothed

EXO_EPSILON = 1e-3
"""The paper's share of flipped labels. At 0 the loss would be infinite."""

CERTAIN = -1e-6
"""Mean log-prob from which on the odds of a completion stay what they are: at 0 they are infinite."""


@dpo_loss("exo", max_smoothing=0.5, differences=True)
def _exo(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = EXO_EPSILON) -> Tensor:
    """Reverse KL from the policy's choice between the two to the labels', of which a share e is flipped: `smoothing`;
    0 is not possible and stands for the paper's 1e-3. Ji et al. 2024 (arXiv 2402.00856), equation 16."""
    epsilon = smoothing or EXO_EPSILON
    logits = beta * pairs.delta
    log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)
    return log_p.exp() * (log_p - math.log1p(-epsilon)) + log_q.exp() * (log_q - math.log(epsilon))


@dpo_loss("nca")
def _nca(pairs: PairLogRatios, beta: float | Tensor = 0.01, smoothing: float = 0.0) -> Tensor:
    """Noise contrastive alignment, pairwise form: the chosen must also gain in itself, not only over the rejected.
    Chen et al. 2024 (arXiv 2402.05369), section 4.1."""
    chosen, rejected = beta * pairs.chosen, beta * pairs.rejected
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


@dpo_loss("bco_pair")
def _bco_pair(pairs: PairLogRatios, beta: float | Tensor = 0.01, smoothing: float = 0.0) -> Tensor:
    """A classifier whose logit is the reward: Jung et al. 2024 (arXiv 2404.04656), without their reward shift, as TRL
    has it since 1.0. `bco` has the shift."""
    return -F.logsigmoid(beta * pairs.chosen) - F.logsigmoid(-beta * pairs.rejected)


@dpo_loss("sppo_hard")
def _sppo_hard(pairs: PairLogRatios, beta: float | Tensor = 0.001, smoothing: float = 0.0) -> Tensor:
    """Self-play preference optimisation with probabilities of winning 1 and 0: Wu et al. 2024 (arXiv 2405.00675),
    equation 4.7, whose eta is 1 / beta."""
    return (pairs.chosen - 0.5 / beta) ** 2 + (pairs.rejected + 0.5 / beta) ** 2


@dpo_loss("apo_zero")
def _apo_zero(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """For chosen completions better than the policy's own: they gain, the rejected lose. D'Oosterlinck et al. 2024
    (arXiv 2408.06266), equation 7."""
    return torch.sigmoid(-beta * pairs.chosen) + torch.sigmoid(beta * pairs.rejected)


@dpo_loss("apo_down")
def _apo_down(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """For chosen completions worse than the policy's own: both lose, the rejected more. D'Oosterlinck et al. 2024
    (arXiv 2408.06266), equation 8."""
    return torch.sigmoid(beta * pairs.chosen) + torch.sigmoid(-beta * pairs.delta)


@dpo_loss("discopop", differences=True, positive=("tau",))
def _discopop(
    pairs: PairLogRatios, beta: float | Tensor = 0.05, smoothing: float = 0.0, *, tau: float = 0.05
) -> Tensor:
    """Log-ratio modulated loss: logistic where the pair is learned, exponential where it is not. Lu et al. 2024 (arXiv
    2406.08414), equation 5. The exponential is continued linearly beyond an exponent of 20.

    Args:
        tau: width of the change from one to the other, above 0.
    """
    x = beta * pairs.delta
    modulation = torch.sigmoid(x / tau)
    return (1 - modulation) * -F.logsigmoid(x) + modulation * bounded_exp(-x)


@dpo_loss("simpo", max_smoothing=0.5, reference=False)
def _simpo(pairs: PairLogRatios, beta: float | Tensor, smoothing: float, *, gamma: float = 0.5) -> Tensor:
    """Length-normalised log-probs themselves are the reward. Meng et al. 2024 (arXiv 2405.14734), equation 6.

    Args:
        gamma: reward margin that is asked for, at least 0; the authors' code has 0.25 beta.
    """
    return smoothed(beta * pairs.mean_delta - gamma, smoothing)


@dpo_loss("orpo", reference=False)
def _orpo(pairs: PairLogRatios, beta: float | Tensor, smoothing: float) -> Tensor:
    """The odds-ratio term, to be added to the NLL of the chosen; beta is the paper's lambda. Hong et al. 2024 (arXiv
    2403.07691), equations 4 to 7."""
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    return -beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p, which is at most 0."""
    logp = logp.clamp(max=CERTAIN)
    return logp - torch.where(logp > -math.log(2), torch.log(-torch.expm1(logp)), torch.log1p(-logp.exp()))
