"""Smoothness of token probabilities: how much they jump from one token of a completion to the next.

With p_t = pi(y_t | y_<t), over neighbours that are both scored (never the prompt's end with the first token):

kind          value                                                     one for each
probability   (p_t - p_{t-1})^2, in [0, 1]                              pair of neighbours
logprob       huber(log p_t - log p_{t-1}), delta 1: at most linear     pair of neighbours
entropy       (h_t - h_{t-1})^2, h the entropy over log V               pair of neighbours
js            Jensen-Shannon divergence of the two distributions        pair of neighbours
variance      variance of log p_t within the completion (ddof 0)        completion of two tokens or more

R_smooth is the mean over what the last column names. `variance` is the closest published relative: Sentence-wise
Smooth Regularization, Gong et al. 2019 (AAAI, arXiv 1812.04784). `js` asks neighbouring distributions to be alike,
which in a text they are not; it is here to compare with. Every kind is least where all p_t are equal, also where all
are near 0: only the preference loss opposes that, so its weight stays small and `p_mean` is logged.

Legend: N completions, C tokens, H hidden size, as in `alignment.batches`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.batches import GroupBatch, within
from alignment.entropy_deficit import Scope, row_scope
from alignment.errors import UserError
from alignment.full_kl import Head, full_kl

Smoothness = Literal["probability", "logprob", "variance", "js", "entropy"]


def check_smoothness(kind: Smoothness) -> None:
    if kind not in get_args(Smoothness):
        raise UserError(f"smoothness is '{kind}'; it is one of {', '.join(get_args(Smoothness))}")


def neighbours(batch: GroupBatch) -> Tensor:
    """[C] bool: a scored token whose predecessor is a scored token of the same completion."""
    scored = batch.scored
    before = torch.cat([scored.new_zeros(min(1, len(scored))), scored[:-1]])
    return scored & before & (within(batch.completion_lengths) > 0)


def smooth_weights(kind: Smoothness, batch: GroupBatch, scope: Scope) -> Tensor:
    """Weight of each value of `smooth_values`, that of its pair of completions; 0 where there is no value or it is
    outside the scope."""
    rows = row_scope(batch, scope)
    if kind == "variance":
        return torch.where(batch.scored_lengths() >= 2, rows, torch.zeros_like(rows))
    return rows[batch.row_of()] * neighbours(batch)


def smooth_values(
    kind: Smoothness,
    batch: GroupBatch,
    logps: Tensor,
    normalised: Tensor,
    hidden: Tensor | None = None,
    head: Head | None = None,
) -> Tensor:
    """[C] value of each token with its predecessor, 0 where there is none; for `variance` [N], one a completion.

    Args:
        logps, normalised: [C] log-prob of each token, and entropy over log V of the distribution it was drawn from.
        hidden, head: [C, H] states that predict the tokens and their LM head, for `js`. Its vocabulary is walked in
            tiles; both distributions get a gradient.
    """
    if kind == "variance":
        mean = batch.mean_tokens(logps)[batch.row_of()]
        return batch.mean_tokens((logps - mean).square())
    pairs = neighbours(batch)
    if kind == "js":
        assert hidden is not None
        assert head is not None
        at = pairs.nonzero()[:, 0]
        return torch.zeros_like(logps).index_put((at,), _adjacent_js(hidden[at], hidden[at - 1], head).to(logps.dtype))
    series = {"probability": logps.exp(), "logprob": logps, "entropy": normalised}[kind]
    now, before = series[1:], series[:-1]
    huber = kind == "logprob"
    jumps = F.huber_loss(now, before, reduction="none", delta=1.0) if huber else (now - before).square()
    jumps = torch.cat([series[:1] * 0, jumps])
    return torch.where(pairs, jumps, torch.zeros_like(jumps))


def _adjacent_js(now: Tensor, before: Tensor, head: Head) -> Tensor:
    """[n] divergence, with the gradients of both sides: each call gives that of its first one."""
    forward, backward = (full_kl("full_js", a, head, b, head) for a, b in ((now, before), (before, now)))
    return forward + (backward - backward.detach())
