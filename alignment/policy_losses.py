"""Losses of policies on sampled completions: per-token losses, their reductions, value loss, entropy terms, metrics.

With r = pi(token) / pi_old(token), A the token's advantage:

name          loss of a token                                 ratio of        reduction             origin
clip          -min(r A, clip(r, 1 - low, 1 + high) A)         the token       token_mean            PPO, GRPO
clip_higher   the same with high .28                          the token       token_mean            DAPO
dual_clip     A < 0: at most 3 |A|                            the token       token_mean            dual-clip PPO
delta         r capped at 4 before the minimum                the token       token_mean            INTELLECT-2, TRL
gspo          clip with the completion's mean ratio           the completion  seq_mean_token_mean   GSPO
cispo         -sg[min(r, cap)] A log pi                       the token       token_mean            MiniMax-M1
sapo          -(4 / tau) sigmoid(tau (r - 1)) A               the token       seq_mean_token_mean   SAPO

A loss is a function `fn(tokens: PolicyTokens, *, settings) -> [C]`; it never averages. To add one, write it and name it
by its import path (`model.loss: my_file.my_loss`), or register it with `@policy_loss("name")`. Reductions divide by the
counts of the *whole* batch over all ranks, so micro-batches and ranks cannot change them.

Unscored tokens are dropped before any arithmetic: a NaN there reaches neither value nor gradient. Shapes as in
`alignment.batches`; everything in fp32 or better, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.bounded import bounded_exp
from alignment.losses import share, weighted
from alignment.metrics import Metrics, mean_of
from alignment.named import Registry

if TYPE_CHECKING:
    from alignment.update import Counts

Reduction = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What a policy loss may look at; all [C], 0 at unscored tokens. Build it with `of`.

    Args:
        logps: log pi(token), with gradient. old_logps: under the policy that sampled, without.
        advantages: without gradient.
        scored: bool. row_of: the completion of each token. lengths: [N] scored tokens of each completion.
    """

    logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    scored: Tensor
    row_of: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, batch: GroupBatch, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> PolicyTokens:
        """From log-probs and advantages, each [C]; those of completions [N] are `values[batch.row_of()]`."""
        # Not told apart by shape: with an empty completion there may be as many completions as tokens.
        assert advantages.shape == logps.shape, "advantages are given for each token"
        zero = torch.zeros_like(logps)
        return cls(
            logps=torch.where(batch.scored, logps, zero),
            old_logps=torch.where(batch.scored, old_logps.detach(), zero),
            advantages=torch.where(batch.scored, advantages.detach().to(logps.dtype), zero),
            scored=batch.scored,
            row_of=batch.row_of(),
            lengths=batch.scored_lengths(),
        )

    @property
    def log_ratio(self) -> Tensor:
        """[C] log r of each token."""
        return self.logps - self.old_logps

    def ratio(self, level: Level = "token") -> Tensor:
        """[C] r of each token, or of its completion: exp of the mean log r over the completion's scored tokens."""
        if level == "token":
            return bounded_exp(self.log_ratio)
        total = torch.zeros_like(self.lengths, dtype=self.logps.dtype).index_add(0, self.row_of, self.log_ratio)
        return bounded_exp(total / self.lengths.clamp(min=1))[self.row_of]


PolicyLossFn = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForm:
    """What a policy loss is made for: whose ratio it clips, and the reduction of its paper."""

    level: Level = "token"
    reduction: Reduction = "token_mean"


POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss")
_FORMS: dict[PolicyLossFn, LossForm] = {}


def policy_loss(
    name: str, *, level: Level = "token", reduction: Reduction = "token_mean"
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register a policy loss under `name`, with its form."""

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        _FORMS[fn] = LossForm(level=level, reduction=reduction)
        return POLICY_LOSSES.register(name)(fn)

    return add


def form_of(name: str) -> LossForm:
    """The form of the loss called `name`; that of an unregistered function is `LossForm()`."""
    return _FORMS.get(POLICY_LOSSES.find(name), LossForm())


# ---------------------------------------------------------------------- losses


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float | None, cap: float | None = None) -> Tensor:
    bound = ratio.clamp(1 - low, 1 + (low if high is None else high))
    capped = ratio if cap is None else ratio.clamp(max=cap)
    return -torch.minimum(capped * advantages, bound * advantages)


@policy_loss("clip")
def clip(tokens: PolicyTokens, *, low: float = 0.2, high: float | None = None) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A); high None: low. PPO, Schulman et al. 2017 (arXiv 1707.06347); GRPO, Shao
    et al. 2024 (arXiv 2402.03300)."""
    return _clipped(tokens.ratio(), tokens.advantages, low, high)


@policy_loss("clip_higher")
def clip_higher(tokens: PolicyTokens, *, low: float = 0.2, high: float = 0.28) -> Tensor:
    """`clip` with more room upwards: DAPO, Yu et al. 2025 (arXiv 2503.14476)."""
    return _clipped(tokens.ratio(), tokens.advantages, low, high)


@policy_loss("dual_clip")
def dual_clip(tokens: PolicyTokens, *, low: float = 0.2, high: float | None = None, c: float = 3.0) -> Tensor:
    """`clip`, but where A < 0 at most c |A|: Ye et al. 2020 (arXiv 1912.09729); verl always does this."""
    loss = _clipped(tokens.ratio(), tokens.advantages, low, high)
    return torch.where(tokens.advantages < 0, torch.minimum(loss, -c * tokens.advantages), loss)


@policy_loss("delta")
def delta(tokens: PolicyTokens, *, low: float = 0.2, high: float | None = None, cap: float = 4.0) -> Tensor:
    """-min(min(r, cap) A, clip(r, 1 - low, 1 + high) A): the two-sided clip of INTELLECT-2 (arXiv 2505.07291), TRL's
    `delta`."""
    return _clipped(tokens.ratio(), tokens.advantages, low, high, cap)


@policy_loss("gspo", level="sequence", reduction="seq_mean_token_mean")
def gspo(tokens: PolicyTokens, *, low: float = 3e-4, high: float | None = 4e-4) -> Tensor:
    """`clip` of the completion's geometric-mean ratio: Zheng et al. 2025 (arXiv 2507.18071). Under seq_mean_token_mean
    this is the paper's objective; token_mean would weigh a completion by its length once more."""
    return _clipped(tokens.ratio("sequence"), tokens.advantages, low, high)


@policy_loss("cispo")
def cispo(tokens: PolicyTokens, *, cap: float = 5.0, floor: float = 0.0) -> Tensor:
    """-sg[clip(r, floor, cap)] A log pi: MiniMax-M1, 2025 (arXiv 2506.13585). The gradient never vanishes. `cap` is the
    largest weight itself (TRL's `epsilon_high`); verl bounds it to [0.8, 1.2]."""
    weight = tokens.ratio().detach().clamp(floor, cap)
    return -weight * tokens.advantages * tokens.logps


@policy_loss("sapo", reduction="seq_mean_token_mean")
def sapo(tokens: PolicyTokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: soft gates, Gao et al. 2025 (arXiv 2511.20347). At r = 1
    the value is 2 A / tau and the gradient's weight 1."""
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    return -4 / tau * torch.sigmoid(tau * (tokens.ratio() - 1)) * tokens.advantages


# ---------------------------------------------------------------------- reductions


def token_weights(
    batch: GroupBatch, counts: Counts, reduction: Reduction = "token_mean", max_length: int | None = None
) -> tuple[Tensor, float]:
    """([C] weights, 0 at unscored tokens; their sum over the whole batch): what a reduction multiplies and divides by.

        token_mean            sum over tokens / tokens of the batch
        seq_mean_token_mean   mean over completions of their mean over tokens
        seq_mean_token_sum    mean over completions of their sum over tokens
        const                 the same divided by `max_length`, the longest a completion may be (Dr.GRPO)

    Completions without a scored token count in none of them. `counts` are those of the whole batch over all ranks.
    """
    row = batch.row_of()
    weights = torch.where(batch.scored, batch.weights[row], 0.0)
    if reduction == "token_mean":
        return weights, counts.tokens
    if reduction == "seq_mean_token_mean":
        return weights / batch.scored_lengths().clamp(min=1)[row], counts.rows
    if reduction == "seq_mean_token_sum":
        return weights, counts.rows
    if reduction == "const":
        if max_length is None or max_length < 1:
            raise ValueError(f"the reduction 'const' divides by max_length, in tokens; got {max_length}")
        return weights, counts.rows * max_length
    raise ValueError(f"reduction {reduction!r} is not known; use {', '.join(get_args(Reduction))}")


def reduce_tokens(
    values: Tensor,
    batch: GroupBatch,
    counts: Counts,
    reduction: Reduction = "token_mean",
    max_length: int | None = None,
) -> Tensor:
    """[C] -> 0-dim: this micro-batch's share of the reduction over the whole batch (see `token_weights`)."""
    return share(values, *token_weights(batch, counts, reduction, max_length))


def mask_truncated(batch: GroupBatch, truncated: Tensor) -> GroupBatch:
    """A copy in which no token of a truncated completion [N] is scored: DAPO's overlong filtering. Advantages keep
    counting them."""
    return replace(batch, scored=batch.scored & ~truncated[batch.row_of()])


# ---------------------------------------------------------------------- entropy


def entropy_bonus(entropy: Tensor, batch: GroupBatch, counts: Counts, coefficient: float) -> Tensor:
    """[C] nats -> 0-dim share of -coefficient times the mean entropy; a token mean whatever the policy's reduction."""
    return -coefficient * reduce_tokens(entropy, batch, counts)


def entropy_threshold(entropy: Tensor, scored: Tensor, keep: float = 0.2) -> float:
    """The entropy that a share `keep` of the scored tokens of all ranks reach: the (1 - keep) quantile, interpolated.
    inf without any scored token. A collective; give it the whole batch, before any cut."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep is {keep}; it is a share above 0 and at most 1")
    parts = distributed.all_gather_objects(entropy.detach()[scored].double().cpu())
    values = torch.cat(parts).sort().values  # type: ignore[arg-type]
    if not len(values):
        return math.inf
    place = (1 - keep) * (len(values) - 1)
    below, above = values[math.floor(place)], values[math.ceil(place)]
    return float(below + (above - below) * (place - math.floor(place)))


def high_entropy(entropy: Tensor, scored: Tensor, threshold: float) -> Tensor:
    """[C] bool: scored tokens whose entropy reaches the threshold. It multiplies the policy term only, not the KL, and
    leaves denominators alone: Wang et al. 2025, "80/20" (arXiv 2506.01939)."""
    return scored & (entropy.detach().double() >= threshold)


# ---------------------------------------------------------------------- values


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """[C] -> [C] max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2; without the second term for None.

    As in PPO's reference code; OpenRLHF takes clip 0.5.
    """
    loss = (values - returns) ** 2
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (bounded - returns) ** 2)
    return loss / 2


def value_metrics(values: Tensor, old_values: Tensor, returns: Tensor, scored: Tensor, clip: float | None) -> Metrics:
    """`value_mean`, and `val/clipfrac_avg` (TRL's name): share of scored tokens where the clipped term is larger."""
    out = {"value_mean": mean_of(values, scored)}
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        out["val/clipfrac_avg"] = mean_of(((bounded - returns) ** 2 > (values - returns) ** 2).double(), scored)
    return out


def explained_variance(values: Tensor, returns: Tensor, scored: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the scored tokens of all ranks; for constant returns 1 when V is exact, else 0. NaN
    without a scored token. A collective; give it the whole batch."""
    target = returns.detach()[scored].double()
    error = target - values.detach()[scored].double()
    moments = torch.stack([torch.ones_like(target).sum(), target.sum(), error.sum()])
    count, sum_target, sum_error = distributed.all_reduce_sum(moments)
    squares = torch.stack([((target - sum_target / count) ** 2).sum(), ((error - sum_error / count) ** 2).sum()])
    total, residual = (float(x) for x in distributed.all_reduce_sum(squares))
    if count == 0:
        return math.nan
    if total == 0:
        return float(residual == 0)
    return 1 - residual / total


# ---------------------------------------------------------------------- metrics


def ratio_metrics(
    tokens: PolicyTokens, weights: Tensor, *, level: Level = "token", low: float = 0.2, high: float | None = None
) -> Metrics:
    """How far the policy has moved from the one that sampled, over tokens weighted by `weights` [C] (see
    `token_weights`); all 0, and the ratio 1, on the first pass after a rollout.

        clip_ratio/low_mean       share of tokens with r < 1 - low and A < 0 (TRL's names)
        clip_ratio/high_mean      r > 1 + high and A > 0
        clip_ratio/region_mean    either
        policy/clipfrac_avg       the same, under the name of TRL's PPO
        policy/approxkl_avg       mean (log r)^2 / 2 (TRL's PPO)
        policy/kl_old             mean -log r (verl's ppo_kl)
        ratio                     mean r
    """
    ratio, log_ratio = tokens.ratio(level).detach(), tokens.log_ratio.detach()
    below = (ratio < 1 - low) & (tokens.advantages < 0)
    above = (ratio > 1 + (low if high is None else high)) & (tokens.advantages > 0)
    values = {
        "clip_ratio/low_mean": below,
        "clip_ratio/high_mean": above,
        "clip_ratio/region_mean": below | above,
        "policy/clipfrac_avg": below | above,
        "policy/approxkl_avg": log_ratio**2 / 2,
        "policy/kl_old": -log_ratio,
        "ratio": ratio,
    }
    return {name: weighted(value, weights) for name, value in values.items()}
