"""Preference losses for which a pair's value depends on the others of the batch.

Each has a function that sees all pairs of the batch, over all micro-batches and ranks, before any of them is judged
(`pair_losses.WholeFn`). It gives every pair what it needs to know: the value it is matched with, a shift, a mean. With
that at hand a pair's loss depends on nothing else, so micro-batches and ranks cannot change it.

name          value                                                             what it must know
aot           -log sigmoid(beta (u_(k) - v_(k))), k-th smallest of each         v that u is matched with
              u: log pi of chosen - rejected, v: the same of the reference
aot_unpaired  the same with u = c and v = j                                     v that u, and u that v is matched with
bco           -log sigmoid(beta c - d) - log sigmoid(-(beta j - d))             d: mean reward of all batches so far
sft           NLL of the chosen / mean number of its tokens: a token mean       that mean number
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.errors import UserError
from alignment.pair_losses import PairLogRatios, dpo_loss, smoothed

SHIFT, COUNT = "bco_shift", "bco_batches"


def matched(own: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """[P] x 3 -> [P]: for the k-th smallest of `own` the k-th smallest of `others`; 0 for pairs of weight 0, which are
    not in the order. Ties are broken by position.

    Raises UserError for weights that differ: pairs then have no one-to-one match.
    """
    used = weights > 0
    if bool((weights[used] != weights[used][:1]).any()):
        raise UserError("aot and aot_unpaired match pairs one to one, so the data's column 'weight' must not differ")
    match = torch.empty_like(others[used])
    match[own[used].argsort(stable=True)] = others[used].sort().values
    found = torch.zeros_like(others)
    found[used] = match
    return found


def _policy_delta(pairs: PairLogRatios) -> tuple[Tensor, Tensor]:
    """([P] log pi of chosen - rejected under the policy, [P] the same under the reference)."""
    if pairs.reference_delta is None:
        raise ValueError("aot needs PairLogRatios.reference_delta")
    return pairs.delta + pairs.reference_delta, pairs.reference_delta


def _aot_whole(
    pairs: PairLogRatios, weights: Tensor, beta: float | Tensor, memory: dict[str, float], learn: bool
) -> Mapping[str, Tensor]:
    policy, reference = _policy_delta(pairs)
    return {"aot": matched(policy, reference, weights)}


@dpo_loss("aot", max_smoothing=0.5, whole=_aot_whole, weighable=False)
def _aot(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """Alignment via optimal transport, paired: the margins of the policy, as a distribution, dominate those of the
    reference. Melnyk et al. 2024 (arXiv 2406.05882), who name no beta: the default is DPO's."""
    return smoothed(beta * (_policy_delta(pairs)[0] - pairs.whole["aot"]), smoothing)


def _aot_unpaired_whole(
    pairs: PairLogRatios, weights: Tensor, beta: float | Tensor, memory: dict[str, float], learn: bool
) -> Mapping[str, Tensor]:
    return {
        "aot_chosen": matched(pairs.chosen, pairs.rejected, weights),
        "aot_rejected": matched(pairs.rejected, pairs.chosen, weights),
    }


@dpo_loss("aot_unpaired", max_smoothing=0.5, whole=_aot_unpaired_whole, weighable=False)
def _aot_unpaired(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """Alignment via optimal transport, unpaired: rewards of chosen completions, as a distribution, dominate those of
    rejected ones. Melnyk et al. 2024 (arXiv 2406.05882).

    A match has its value at the pair of its chosen completion, and each side its own gradient: summed over the batch
    that is the loss of the sorted values.
    """
    chosen = smoothed(beta * (pairs.chosen - pairs.whole["aot_chosen"]), smoothing)
    rejected = smoothed(beta * (pairs.whole["aot_rejected"] - pairs.rejected), smoothing)
    return chosen + (rejected - rejected.detach())


def _bco_whole(
    pairs: PairLogRatios, weights: Tensor, beta: float | Tensor, memory: dict[str, float], learn: bool
) -> Mapping[str, Tensor]:
    used = weights > 0
    rewards = beta * (pairs.chosen + pairs.rejected).double() / 2
    total = float(weights.double().sum())
    mean = float(torch.where(used, rewards * weights, 0.0).sum()) / total if total else math.nan
    if learn and math.isfinite(mean):
        count = memory.get(COUNT, 0.0) + 1
        memory[SHIFT] = memory.get(SHIFT, 0.0) + (mean - memory.get(SHIFT, 0.0)) / count
        memory[COUNT] = count
    return {SHIFT: torch.full_like(pairs.chosen, memory.get(SHIFT, 0.0))}


@dpo_loss("bco", whole=_bco_whole)
def _bco(pairs: PairLogRatios, beta: float | Tensor = 0.01, smoothing: float = 0.0) -> Tensor:
    """Binary classifier optimisation with its reward shift d, the mean over all batches trained on so far, this one
    included, of the mean reward of both sides. Jung et al. 2024 (arXiv 2404.04656), section 4; summed over the
    sides."""
    shift = pairs.whole[SHIFT]
    return -F.logsigmoid(beta * pairs.chosen - shift) - F.logsigmoid(shift - beta * pairs.rejected)


def _sft_whole(
    pairs: PairLogRatios, weights: Tensor, beta: float | Tensor, memory: dict[str, float], learn: bool
) -> Mapping[str, Tensor]:
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    return {"sft_tokens": ((pairs.chosen_tokens * weights).sum() / total).expand(len(weights))}


@dpo_loss("sft", differences=True, whole=_sft_whole, masks_only=True, weighable=False)
def _sft(pairs: PairLogRatios, beta: float | Tensor, smoothing: float) -> Tensor:
    """Negative log-likelihood of the chosen completions, a mean over their tokens in the whole batch: for mixtures, as
    TRL's `sft`. `sft_weight` of `modules.DPO` is a mean over pairs instead."""
    if pairs.chosen_nll is None:
        raise ValueError("sft needs PairLogRatios.chosen_nll")
    return pairs.chosen_nll / pairs.whole["sft_tokens"]
