"""Losses of the offline algorithms, as pure tensor functions. Shapes as in `alignment.batches`; everything is in fp32
or better, in nats, and nothing here reads a model.

A loss function returns one value per pair or row and never reduces over the batch: the caller multiplies by weights and
divides by counts of the *whole* batch (`share`), so that micro-batches and ranks cannot change the result.

To add a preference loss, write one function of a `PairLogRatios` and decorate it with `@dpo_loss("name")`, or give its
import path as the name (`loss: my_losses.squared_hinge`). The defaults in its signature are those of runs with it. The
rest of the family is in `alignment.preference_losses` and `alignment.batch_losses`; importing this module registers
them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment import batch_losses, preference_losses  # noqa: F401 - they register theirs
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.pair_losses import DPO_LOSSES, DPOLoss, PairLogRatios, dpo_loss, smoothed

__all__ = [
    "DPO_LOSSES",
    "Aggregation",
    "DPOLoss",
    "PairLogRatios",
    "aggregate",
    "bradley_terry",
    "centring",
    "check_margin_columns",
    "check_margins",
    "dpo_loss",
    "length_desensitised",
    "margin_of",
    "share",
    "token_nll",
    "weighted",
]

Aggregation = Literal["mean", "min", "uwo"]


def share(values: Tensor, weights: Tensor, total: float) -> Tensor:
    """[K], [K] -> 0-dim: this micro-batch's part of a weighted mean whose weights sum to `total` over batch and ranks.

    Entries of weight 0 are dropped, not multiplied by zero: a NaN there does not reach the sum, and the gradient with
    respect to such a value is exactly 0. `total` 0 (nothing to train on anywhere) gives 0; a NaN total gives NaN.
    """
    kept = torch.where(weights > 0, values * weights, torch.zeros_like(values))
    return kept.sum() * 0.0 if total == 0 else kept.sum() / total


def weighted(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[K], [K] -> (weighted sum, sum of weights) in float64 without gradient: a metric as `alignment.metrics` takes it.
    Entries of weight 0 are dropped."""
    values, weights = values.detach().double(), weights.double()
    return torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum(), weights.sum()


def token_nll(token_logps: Tensor, scored: Tensor) -> Tensor:
    """[C] log-probs -> [C] negative log-likelihood in nats, 0 at unscored positions."""
    return torch.where(scored, -token_logps, torch.zeros_like(token_logps))


# ---------------------------------------------------------------------- reward model


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """[P] scores -> [P] -log sigmoid(r_w - r_l - m).

    Bradley and Terry (1952); the margin as in Touvron et al. 2023 (arXiv 2307.09288), equation 2.
    """
    gap = chosen - rejected
    return -F.logsigmoid(gap if margin is None else gap - margin)


def centring(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[P] scores -> [P] (r_w + r_l)^2, the auxiliary loss that keeps scores centred at zero.

    Eisenstein et al. 2023 (arXiv 2312.09244); TRL calls its coefficient `center_rewards_coefficient`.
    """
    return (chosen + rejected) ** 2


def aggregate(scores: Tensor, how: Aggregation, uncertainty_penalty: float = 0.5) -> Tensor:
    """[N, E] scores of an ensemble -> [N].

    `mean`; `min` (worst case); `uwo` = mean - uncertainty_penalty * population variance over members, from
    Coste et al. 2023 (arXiv 2310.02743).
    """
    if how == "mean":
        return scores.mean(dim=1)
    if how == "min":
        return scores.min(dim=1).values
    if how == "uwo":
        return scores.mean(dim=1) - uncertainty_penalty * scores.var(dim=1, correction=0)
    raise ValueError(f"aggregation {how!r} is not known; use mean, min or uwo")


# ---------------------------------------------------------------------- direct preference optimisation


def check_margins(name: str, margins: Mapping[str, float]) -> None:
    """Raise UserError unless the loss called `name` goes with these columns and weights."""
    known = DPO_LOSSES.get(name)
    if known is not None and known.margins != bool(margins):
        users = ", ".join(sorted(n for n, entry in DPO_LOSSES.items() if entry.margins))
        if margins:
            raise UserError(f"preference loss {name!r} does not use margins ({', '.join(margins)}); these do: {users}")
        raise UserError(f"preference loss {name!r} needs margins: data column -> weight, for example {{brevity: 0.3}}")
    if not all(weight > 0 for weight in margins.values()) or not sum(margins.values()) < 1:
        given = ", ".join(f"{column} {weight:g}" for column, weight in margins.items())
        raise UserError(f"margins have weights {given}; each is above 0, and together they leave a share of 1")


def check_margin_columns(groups: Iterable[Group], weights: Mapping[str, float]) -> None:
    """Raise UserError for a data column of `weights` that no row has, and for the first row without a number in one.

    For the start of a run: `margin_of` says the same of a batch, when the model is there.
    """
    known: set[str] = set()
    complaint: UserError | None = None
    for group in groups:
        known |= group.columns.keys() | group.rows.keys()
        for name in weights:
            value = group.columns.get(name)
            if complaint is None and name not in group.rows and not _is_margin(value):
                complaint = _no_margin(group.index, name, value)
    if complaint is None:
        return
    if lacking := [name for name in weights if name not in known]:
        raise UserError(
            f"margins names the column '{lacking[0]}', which no row of the data has; the data's columns: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    raise complaint


def _is_margin(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _no_margin(index: int, name: str, value: object) -> UserError:
    return UserError(
        f"row {index} has {value!r} in column '{name}', which margins names; it must be a number: the reward of the "
        "chosen completion minus that of the rejected one"
    )


def margin_of(batch: GroupBatch, weights: Mapping[str, float]) -> Tensor:
    """[P] sum over data columns of weight * value, the difference between chosen and rejected in another reward.

    Raises UserError naming the row and the column that has no number.
    """
    total = torch.zeros(batch.num_prompts, dtype=torch.float32, device=batch.device)
    for name, weight in weights.items():
        if name in batch.rows:
            total = total + weight * batch.pair(batch.rows[name])[0]
            continue
        values = [columns.get(name) for columns in batch.columns or ({},) * batch.num_prompts]
        for index, value in zip(batch.group_index.tolist(), values, strict=True):
            if not _is_margin(value):
                raise _no_margin(index, name, value)
        total = total + weight * torch.tensor(values, dtype=torch.float32, device=batch.device)
    return total


@dpo_loss("sigmoid", max_smoothing=0.5, differences=True)
def _sigmoid(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta delta), Rafailov et al. 2023 (arXiv 2305.18290). With label smoothing e it is cDPO (Mitchell
    2023): -(1 - e) log sigmoid(beta delta) - e log sigmoid(-beta delta)."""
    return smoothed(beta * pairs.delta, smoothing)


@dpo_loss("sigmoid_norm", max_smoothing=0.5, differences=True)
def _sigmoid_norm(pairs: PairLogRatios, beta: float | Tensor = 5.0, smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta * length-normalised delta), Tulu 3 (arXiv 2411.15124), whose beta is 5."""
    return smoothed(beta * pairs.mean_delta, smoothing)


@dpo_loss("hinge", differences=True)
def _hinge(pairs: PairLogRatios, beta: float | Tensor = 0.05, smoothing: float = 0.0) -> Tensor:
    """max(0, 1 - beta delta), SLiC's hinge (Zhao et al. 2023, arXiv 2305.10425) of log-ratios: hinge-norm of Liu et al.
    2023 (arXiv 2309.06657), whose gamma is beta, 0.05."""
    return torch.relu(1 - beta * pairs.delta)


@dpo_loss("ipo", differences=True)
def _ipo(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """(length-normalised delta - 1 / (2 beta))^2: Azar et al. 2023 (arXiv 2310.12036), normalised as in TRL. The paper
    has bandits alone, at a beta (its tau) of 0.1, 0.5 and 1."""
    return (pairs.mean_delta - 1 / (2 * beta)) ** 2


@dpo_loss("ipo_sum", differences=True)
def _ipo_sum(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """(delta - 1 / (2 beta))^2: the paper's own form, on summed log-ratios."""
    return (pairs.delta - 1 / (2 * beta)) ** 2


@dpo_loss("robust", max_smoothing=0.5, differences=True)
def _robust(pairs: PairLogRatios, beta: float | Tensor = 0.01, smoothing: float = 0.1) -> Tensor:
    """[-(1 - e) log sigmoid(beta delta) + e log sigmoid(-beta delta)] / (1 - 2e), unbiased when a share e of the labels
    is flipped, a tenth by default: Chowdhury et al. 2024 (arXiv 2403.00409)."""
    logits = beta * pairs.delta
    return (-(1 - smoothing) * F.logsigmoid(logits) + smoothing * F.logsigmoid(-logits)) / (1 - 2 * smoothing)


@dpo_loss("modpo", max_smoothing=0.5, margins=True, differences=True)
def _modpo(pairs: PairLogRatios, beta: float | Tensor = 0.1, smoothing: float = 0.0) -> Tensor:
    """-log sigmoid((beta delta - margin) / share): the preferences' own objective learns what the other objectives'
    rewards, weighted, do not explain. Zhou et al. 2024 (arXiv 2310.03708)."""
    assert pairs.margin is not None, "margins are checked when the loss is chosen"
    return smoothed((beta * pairs.delta - pairs.margin) / pairs.share, smoothing)


def length_desensitised(batch: GroupBatch, alpha: float) -> Tensor:
    """[C] weight of each token's log-ratio in LD-DPO (Liu et al. 2024, arXiv 2409.06411): 1 for the first
    min(|y_w|, |y_l|) scored tokens of a completion, `alpha` for those beyond. alpha 1 is plain DPO."""
    lengths = batch.scored_lengths()
    chosen, rejected = batch.pair(lengths)
    shared = torch.minimum(chosen, rejected).repeat_interleave(2)
    row = batch.row_of()
    ends = lengths.cumsum(0)
    rank_in_row = batch.scored.long().cumsum(0) - (ends - lengths)[row]  # 1 for a row's first scored token
    beyond = rank_in_row > shared[row]
    return torch.where(beyond, alpha, 1.0).to(batch.weights.dtype)
