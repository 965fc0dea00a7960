"""Drawing tokens: keyed noise, and one pass over the logits.

An exponential race draws from weights w: with independent exponential clocks E_i, the first i = argmin E_i / w_i wins
with probability w_i / sum w. In logarithms it is Gumbel's trick, argmax(log w_i + G_i), G_i = -log E_i. Noise for a
whole vocabulary costs more than the logits themselves, so the race is run twice on a small field: among blocks of
tokens, whose weight is the sum of theirs, then among the tokens of the winning block. The result has exactly the same
distribution and needs V / 256 + 256 random numbers instead of V.

Each number is a hash of (key of the completion, position in the completion, token id or block): no state, no order of
draws, the same on every device. Two runs whose logits differ by rounding draw the same token unless two runners end
closer than the rounding.

Legend: n rows, V vocabulary, k candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.rollout import SamplingConfig

_BLOCK = 256

# Block numbers and token ids hash apart.
_BLOCKS = 1 << 40

# Nucleus sampling looks at this many likeliest tokens first, and at more only if they do not reach top_p together.
_NUCLEUS = 128

# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def draw(
    logits: Tensor, keys: Tensor, position: int, sampling: SamplingConfig, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row.

    Args:
        logits: [n, V] in fp32 or fp64; overwritten.
        keys: [n] int64, one per completion (`rollout.completion_keys`).
        position: number of tokens the completions have so far.
        banned: [b] token ids that may not be drawn (stop tokens before `min_tokens`).

    Returns:
        ids [n] int64 and their log-probs [n], over the whole vocabulary at `sampling.score_temperature`, in the dtype
        of the logits.
    """
    z = logits
    if sampling.score_temperature != 1.0:
        z /= sampling.score_temperature
    if sampling.greedy or banned is not None or sampling.top_k or sampling.top_p < 1.0 or sampling.min_p:
        norm = z.logsumexp(-1)
        if banned is not None:
            # The log-prob is that of the model, which knows no ban: it may change who is drawn and nothing else.
            z.index_fill_(1, banned, -torch.inf)
        if sampling.greedy:
            best, ids = z.max(-1)
            return ids, best - norm
        if sampling.top_k or sampling.top_p < 1.0:
            return _race_of_candidates(z, norm, keys, position, sampling)
        if sampling.min_p:
            _drop_unlikely(z, z.amax(-1, keepdim=True), sampling.min_p)
        ids, logp, mass = _race_in_two_heats(z, keys, position)
        return ids, logp + (mass - norm.double()).to(z.dtype)
    ids, logp, _ = _race_in_two_heats(z, keys, position)
    return ids, logp


def gumbel(keys: Tensor, position: int, items: Tensor) -> Tensor:
    """Gumbel noise in fp64 for `items` ([k] or [n, k] int64) of each row ([n] keys): [n, k]."""
    rows = _mix(keys + _wrapped(_GAMMA * (position + 1)))
    bits = _mix(rows[:, None] + (items + 1) * _GAMMA)
    uniform = ((bits >> 11 & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _wrapped(number: int) -> int:
    """A Python integer as the signed 64-bit one with the same lowest bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, whose products wrap around; shifts are made logical by masking."""
    x = (x ^ (x >> 30 & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ (x >> 27 & ((1 << 37) - 1))) * _MIX_2
    return x ^ (x >> 31 & ((1 << 33) - 1))


def _race_in_two_heats(z: Tensor, keys: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from softmax(z); z [n, V] becomes exp(z - max). Returns ids, log-probs under that softmax and its log sum.

    The log sum [n] is in fp64, so that nothing is lost when it is compared with another one.
    """
    n, vocab = z.shape
    top = z.amax(-1, keepdim=True)
    weights = z.sub_(top).exp_()
    whole = vocab // _BLOCK * _BLOCK
    blocks = weights[:, :whole].view(n, -1, _BLOCK).sum(-1)
    if whole < vocab:
        blocks = torch.cat([blocks, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    blocks = blocks.double()
    numbers = torch.arange(blocks.shape[1], device=z.device)
    winner = (blocks.log() + gumbel(keys, position, numbers + _BLOCKS)).argmax(-1, keepdim=True)

    ids = winner * _BLOCK + torch.arange(_BLOCK, device=z.device)
    runners = weights.gather(1, ids.clamp(max=vocab - 1)).double().masked_fill(ids >= vocab, 0.0).log()
    place = (runners + gumbel(keys, position, ids)).argmax(-1, keepdim=True)
    total = blocks.sum(-1).log()
    logp = runners.gather(1, place)[:, 0] - total
    return ids.gather(1, place)[:, 0], logp.to(z.dtype), total + top[:, 0].double()


def _race_of_candidates(
    z: Tensor, norm: Tensor, keys: Tensor, position: int, sampling: SamplingConfig
) -> tuple[Tensor, Tensor]:
    """Draw among the tokens that top_k, top_p and min_p leave; z [n, V], norm [n] the log sum of exp(z)."""
    values, ids = _candidates(z, sampling)
    logp = (values - norm[:, None]).double()
    allowed = z.logsumexp(-1) if sampling.top_k == 0 else values.logsumexp(-1)
    if sampling.top_p < 1.0:
        share = (values - allowed[:, None]).double().exp()
        # A token stays while the likelier ones together have not reached top_p; the likeliest always stays.
        values = values.masked_fill(share.cumsum(-1) - share >= sampling.top_p, -torch.inf)
    if sampling.min_p:
        _drop_unlikely(values, values[:, :1], sampling.min_p)
    place = (values.double() + gumbel(keys, position, ids)).argmax(-1, keepdim=True)
    return ids.gather(1, place)[:, 0], logp.gather(1, place)[:, 0].to(z.dtype)


def _candidates(z: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in descending order, [n, k] logits and ids: enough of them to hold every token kept."""
    vocab = z.shape[1]
    if sampling.top_k:
        return z.topk(min(sampling.top_k, vocab), dim=-1)
    norm = z.logsumexp(-1, keepdim=True)
    k = min(_NUCLEUS, vocab)
    values, ids = z.topk(k, dim=-1)
    while k < vocab and bool(((values - norm).double().exp().sum(-1) < sampling.top_p).any()):
        k = min(8 * k, vocab)
        values, ids = z.topk(k, dim=-1)
    return values, ids


def _drop_unlikely(z: Tensor, best: Tensor, min_p: float) -> None:
    """Set logits to -inf in place whose probability is below `min_p` times that of `best` [n, 1]."""
    z.masked_fill_(z - best < torch.tensor(min_p, dtype=torch.float64).log().item(), -torch.inf)
