"""Losses of the offline algorithms, as pure tensor functions. Shapes as in `alignment.batches`; everything is in fp32
or better, in nats, and nothing here reads a model.

A loss function returns one value per pair or row and never reduces over the batch: the caller multiplies by weights and
divides by counts of the *whole* batch (`share`), so that micro-batches and ranks cannot change the result.

To add a preference loss, write one function of a `PairLogRatios` and decorate it with `@dpo_loss("name")`, or give its
import path as the name (`loss: my_losses.squared_hinge`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.named import imported

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogRatios:
    """What a preference loss may look at.

    Args:
        chosen, rejected: [P] sum over scored tokens of log pi(token) - log pi_ref(token), in nats.
        chosen_tokens, rejected_tokens: [P] scored tokens of each completion, at least 1.
        margin: [P] sum over other objectives of weight times (reward of the chosen - reward of the rejected), for
            losses that have any. share: the weight that they leave to what the preferences are about.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    margin: Tensor | None = None
    share: float = 1.0

    @property
    def delta(self) -> Tensor:
        """[P] log-ratio of the chosen minus that of the rejected completion."""
        return self.chosen - self.rejected

    @property
    def mean_delta(self) -> Tensor:
        """[P] the same with each log-ratio divided by its completion's number of scored tokens."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens


DPOLossFn = Callable[[PairLogRatios, float, float], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss:
    """A registered loss: `fn(pairs, beta, label_smoothing) -> [P]`, for label_smoothing in [0, max_smoothing), and
    whether it needs `PairLogRatios.margin`."""

    fn: DPOLossFn
    max_smoothing: float
    margins: bool = False


DPO_LOSSES: dict[str, DPOLoss] = {}


def dpo_loss(
    name: str, *, max_smoothing: float = 0.0, margins: bool = False
) -> Callable[[DPOLossFn], DPOLossFn]:
    """Register a preference loss. `max_smoothing` 0 means that the loss has no use for label smoothing."""

    def register(fn: DPOLossFn) -> DPOLossFn:
        if name in DPO_LOSSES:
            raise ValueError(f"a preference loss called {name!r} exists already")
        DPO_LOSSES[name] = DPOLoss(fn=fn, max_smoothing=max_smoothing, margins=margins)
        return fn

    return register


def check_dpo_loss(name: str, beta: float, label_smoothing: float) -> DPOLossFn:
    """The loss function called `name`, or the one at the import path `name`, which may use label smoothing as it likes.
    Raises UserError for an unknown name or a setting it is not defined for."""
    if "." in name:
        loss = DPOLoss(fn=imported("preference loss", name), max_smoothing=0.5)
    elif name in DPO_LOSSES:
        loss = DPO_LOSSES[name]
    else:
        known = ", ".join(sorted(DPO_LOSSES))
        raise UserError(f"preference loss {name!r} is not known; available: {known}, or the import path of your own")
    if not beta > 0:
        raise UserError(f"beta is {beta}; it must be positive")
    if label_smoothing and loss.max_smoothing == 0:
        users = ", ".join(sorted(n for n, entry in DPO_LOSSES.items() if entry.max_smoothing > 0))
        raise UserError(f"preference loss {name!r} does not use label_smoothing ({label_smoothing}); these do: {users}")
    if label_smoothing and not 0 <= label_smoothing < loss.max_smoothing:
        raise UserError(f"{name!r} needs 0 <= label_smoothing < {loss.max_smoothing}, got {label_smoothing}")
    return loss.fn


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


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    loss = -F.logsigmoid(logits)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * F.logsigmoid(-logits)


@dpo_loss("sigmoid", max_smoothing=0.5)
def _sigmoid(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """-log sigmoid(beta delta), Rafailov et al. 2023 (arXiv 2305.18290). With label smoothing e it is cDPO (Mitchell
    2023): -(1 - e) log sigmoid(beta delta) - e log sigmoid(-beta delta)."""
    return _smoothed(beta * pairs.delta, smoothing)


@dpo_loss("sigmoid_norm", max_smoothing=0.5)
def _sigmoid_norm(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """-log sigmoid(beta * length-normalised delta), Tulu 3 (arXiv 2411.15124). Needs a larger beta, about 2 to 10."""
    return _smoothed(beta * pairs.mean_delta, smoothing)


@dpo_loss("hinge")
def _hinge(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """max(0, 1 - beta delta), SLiC: Zhao et al. 2023 (arXiv 2305.10425)."""
    return torch.relu(1 - beta * pairs.delta)


@dpo_loss("ipo")
def _ipo(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """(length-normalised delta - 1 / (2 beta))^2: Azar et al. 2023 (arXiv 2310.12036), normalised as in TRL."""
    return (pairs.mean_delta - 1 / (2 * beta)) ** 2


@dpo_loss("ipo_sum")
def _ipo_sum(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """(delta - 1 / (2 beta))^2: the paper's own form, on summed log-ratios."""
    return (pairs.delta - 1 / (2 * beta)) ** 2


@dpo_loss("robust", max_smoothing=0.5)
def _robust(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """[-(1 - e) log sigmoid(beta delta) + e log sigmoid(-beta delta)] / (1 - 2e), unbiased when a share e of the labels
    is flipped: Chowdhury et al. 2024 (arXiv 2403.00409)."""
    logits = beta * pairs.delta
    return (-(1 - smoothing) * F.logsigmoid(logits) + smoothing * F.logsigmoid(-logits)) / (1 - 2 * smoothing)


@dpo_loss("modpo", max_smoothing=0.5, margins=True)
def _modpo(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """-log sigmoid((beta delta - margin) / share): the preferences' own objective learns what the other objectives'
    rewards, weighted, do not explain. Zhou et al. 2024 (arXiv 2310.03708)."""
    assert pairs.margin is not None, "margins are checked when the loss is chosen"
    return _smoothed((beta * pairs.delta - pairs.margin) / pairs.share, smoothing)


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
