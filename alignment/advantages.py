"""Advantages of completions, from rewards: group-relative estimators. Those of tokens are in `alignment.gae`.

A group-relative estimator is a function `RewardTable -> [N]`; one that normalises rewards apart returns `Decoupled`. To
add one, write it and name it in YAML by its import path (`model.advantage: my_file.my_advantage`), or register it with
`@ADVANTAGES.register("name")`.

Rules for every estimator:
* NaN means that a reward did not apply. It is left out of sums, means and deviations; it is never 0. A completion
  without any reward has advantage 0, is not trained on (`Advantages.valid`) and is in no statistic.
* A group with fewer than two scores, or whose scores are all alike (max - min <= 1e-6 max(1, |mean|)), has advantage
  exactly 0: dividing rounding errors by a small deviation would invent a signal.
* Deviations are unbiased (ddof 1). Statistics of the batch are over all ranks, before any cut into mini-batches.

Shapes: P groups, N completions, K rewards (legend of `alignment.batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from alignment import distributed
from alignment.errors import UserError
from alignment.named import Registry

FLAT = 1e-6  # relative range below which values count as equal
SCALED_BOUND = 10.0  # a scaled leave-one-out advantage is cut here: large groups with one success exceed it


# ---------------------------------------------------------------------- what an estimator sees


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Per group, over the values that are not NaN: count [P], mean [P], unbiased std [P] (0 below two values), and
    whether they are flat [P] bool: fewer than two, or all alike."""

    count: Tensor
    mean: Tensor
    std: Tensor
    flat: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    """The rewards of a batch.

    Args:
        rewards: [N, K], NaN where a reward did not apply. Estimators see float64.
        weights: [K] of the rewards in the summed score.
        group_of: [N] the group of each completion, 0 to groups - 1.
        groups: P.
        penalty: [N] subtracted from the summed score (coefficient times KL). None: nothing is.
        lengths: [N] scored tokens of each completion, for estimators that weigh by them.
    """

    rewards: Tensor
    weights: Tensor
    group_of: Tensor
    groups: int
    penalty: Tensor | None = None
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.rewards.shape
        for name, size in (("weights", k), ("group_of", n), ("penalty", n), ("lengths", n)):
            given: Tensor | None = getattr(self, name)
            if given is not None and given.shape != (size,):
                raise ValueError(
                    f"rewards are {n} completions by {k} rewards; {name} is {tuple(given.shape)}, it must be ({size},)"
                )

    @classmethod
    def of_scores(cls, scores: Tensor, group_of: Tensor, groups: int | None = None) -> RewardTable:
        """The table of one reward [N]. `groups` None: as many as `group_of` names."""
        count = int(group_of.max()) + 1 if groups is None and len(group_of) else groups or 0
        return cls(
            rewards=scores[:, None], weights=torch.ones(1, device=scores.device), group_of=group_of, groups=count
        )

    @property
    def scores(self) -> Tensor:
        """[N] weighted sum of the rewards that apply, minus the penalty; NaN where none does."""
        applies = ~self.rewards.isnan()
        total = torch.where(applies, self.rewards * self.weights, 0.0).sum(1)
        total = total if self.penalty is None else total - self.penalty
        return torch.where(applies.any(1), total, torch.nan)

    def stats(self, values: Tensor) -> GroupStats:
        """Of values [N] with NaN where there is none."""
        known, index = ~values.isnan(), self.group_of
        kept = torch.where(known, values, 0.0)
        empty = torch.zeros(self.groups, dtype=values.dtype, device=values.device)
        count = empty.index_add(0, index, known.to(values.dtype))
        mean = empty.index_add(0, index, kept) / count.clamp(min=1)
        squares = torch.where(known, (values - mean[index]) ** 2, 0.0)
        std = (empty.index_add(0, index, squares) / (count - 1).clamp(min=1)).sqrt()
        top = empty.scatter_reduce(0, index, torch.where(known, values, -torch.inf), "amax", include_self=False)
        low = empty.scatter_reduce(0, index, torch.where(known, values, torch.inf), "amin", include_self=False)
        flat = (count < 2) | (top - low <= FLAT * mean.abs().clamp(min=1))
        return GroupStats(count=count, mean=mean, std=std, flat=flat)

    def informative(self) -> Tensor:
        """[P, K] bool: the reward differs within the group."""
        return ~torch.stack([self.stats(reward).flat for reward in self.rewards.T], dim=1)

    def centred(self, values: Tensor, stats: GroupStats) -> Tensor:
        """[N] values minus their group's mean; exactly 0 where there is no value and in flat groups."""
        used = ~values.isnan() & ~stats.flat[self.group_of]
        return torch.where(used, values - stats.mean[self.group_of], 0.0)

    def largest(self, values: Tensor) -> Tensor:
        """[P] the largest value of each group, 0 where a group is empty."""
        empty = torch.zeros(self.groups, dtype=values.dtype, device=values.device)
        return empty.scatter_reduce(0, self.group_of, values, "amax", include_self=False)

    def normalised(self, values: Tensor, eps: float) -> Tensor:
        """[N] (value - mean) / (std + eps) of the group; exactly 0 where there is no value and in flat groups."""
        stats = self.stats(values)
        return divided(self.centred(values, stats), (stats.std + eps)[self.group_of])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoupled:
    """Advantages from rewards that were normalised apart, and what they were made of.

    Args:
        each: [N, K] every reward normalised within its group; 0 where it abstained or does not differ in the group.
        summed: [N] weighted sum of these: the advantage before normalisation over the batch.
        deviation: 0-dim, what that normalisation divided by; 1 where there is none.
        values: [N] the advantage.
        warning: what is wrong with the batch as a whole, "" if nothing.
    """

    each: Tensor
    summed: Tensor
    deviation: Tensor
    values: Tensor
    warning: str = ""


Estimator = Callable[..., Tensor | Decoupled]
"""fn(table: RewardTable, *, settings) -> [N] advantages; whatever it returns for a completion without reward is 0."""

ADVANTAGES: Registry[Estimator] = Registry("advantage")


def spread(values: Tensor) -> Tensor:
    """[N] with NaN -> 0-dim unbiased std over the values that are not NaN; 0 below two of them."""
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else values.new_zeros(())


def divided(values: Tensor, deviation: Tensor) -> Tensor:
    """values / deviation; 0 where the deviation is, which then has nothing to divide."""
    return torch.where(deviation > 0, values / deviation, 0.0)


# ---------------------------------------------------------------------- group-relative estimators


@ADVANTAGES.register("group")
def group(table: RewardTable, *, eps: float = 1e-4) -> Tensor:
    """(s - mean_g) / (std_g + eps): GRPO, Shao et al. 2024 (arXiv 2402.03300); eps as in TRL, 1e-6 in verl."""
    return table.normalised(table.scores, eps)


@ADVANTAGES.register("none")
def none(table: RewardTable) -> Tensor:
    """s - mean_g: Dr.GRPO, Liu et al. 2025 (arXiv 2503.20783). Goes with the `const` reduction."""
    scores = table.scores
    return table.centred(scores, table.stats(scores))


@ADVANTAGES.register("batch")
def batch(table: RewardTable, *, eps: float = 1e-4) -> Tensor:
    """(s - mean_g) / (std of all s + eps): Lite-PPO, Liu et al. 2025 (arXiv 2508.08221). The deviation is that of the
    scores themselves, not of the centred ones."""
    scores = table.scores
    return divided(table.centred(scores, table.stats(scores)), spread(scores) + eps)


@ADVANTAGES.register("rloo")
def rloo(table: RewardTable, *, scale: Literal["none", "group", "batch"] = "none", eps: float = 1e-4) -> Tensor:
    """s minus the mean of the group's other scores: RLOO, Ahmadian et al. 2024 (arXiv 2402.14740).

    `scale` divides by the deviation of the group's scores, or by that of all advantages of the batch. Never by the
    deviation of the *other* scores: it is 0 for the only success of a group. Scaled advantages are cut at +-10.
    """
    scores = table.scores
    stats = table.stats(scores)
    others = (stats.count / (stats.count - 1).clamp(min=1))[table.group_of]
    values = table.centred(scores, stats) * others
    if scale == "none":
        return values
    if scale == "group":
        deviation = stats.std[table.group_of]
    elif scale == "batch":
        deviation = spread(torch.where(scores.isnan(), torch.nan, values))
    else:
        raise UserError(f"scale {scale!r} is not known; use none, group or batch")
    return divided(values, deviation + eps).clamp(-SCALED_BOUND, SCALED_BOUND)


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(table: RewardTable, *, eps: float = 1e-8) -> Tensor:
    """(s - mean_g) / sqrt(variance of that over the batch + eps): REINFORCE++-baseline, Hu et al. 2025
    (arXiv 2501.03262), whitened over completions.

    verl whitens over tokens, so that long completions weigh more and groups without signal get an advantage; here the
    mean of the centred scores is 0 by construction and is not subtracted again.
    """
    scores = table.scores
    values = table.centred(scores, table.stats(scores))
    return divided(values, (spread(torch.where(scores.isnan(), torch.nan, values)) ** 2 + eps).sqrt())


# ---------------------------------------------------------------------- rewards normalised apart

Whiten = Literal["sequence", "token", "none"]


@ADVANTAGES.register("gdpo")
def gdpo(
    table: RewardTable, *, whiten: Whiten = "sequence", eps: float = 1e-4, batch_eps: float | None = None
) -> Decoupled:
    """Group reward-decoupled normalisation: GDPO, Liu et al. 2026 (arXiv 2601.05242), equations 4, 6 and 7.

        A_k = (r_k - mean_g r_k) / (std_g r_k + eps)      S = sum_k w_k A_k      A = (S - mean S) / (std S + eps)

    A reward that abstained on a completion is missing from its sum. Terms that cancel but for rounding sum to exactly
    0. The last step goes over all completions with a reward, of all ranks; its mean is 0 by construction and is not
    subtracted. One reward needs no second step: it gives `group` of it. A penalty (KL) is no reward: centred in its
    group, but not normalised, it is subtracted at the end, so that its coefficient is relative to advantages of
    deviation 1, as in the loss.

    Args:
        whiten: `sequence` as above; `none` stops at S; `token` takes mean and variance over tokens, as verl does: long
            completions then weigh more, and completions with S = 0 get an advantage.
        eps: as in TRL; 1e-6 in verl and NeMo-RL.
        batch_eps: added to the deviation of the batch, as `eps` unless given (0 in NeMo-RL); under `token` to its
            variance, 1e-8 unless given.
    """
    rewards, weights = table.rewards, table.weights
    if rewards.shape[1] == 1:
        rewards, weights, whiten = rewards * weights, torch.ones_like(weights), "none"
    each = torch.stack([table.normalised(reward, eps) for reward in rewards.T], dim=1)
    summed = _summed(table, each * weights)
    known = ~table.rewards.isnan().all(1)
    mean, deviation = summed.new_zeros(()), summed.new_ones(())
    if whiten == "sequence":
        deviation = spread(torch.where(known, summed, torch.nan)) + (eps if batch_eps is None else batch_eps)
    elif whiten == "token":
        mean, deviation = _over_tokens(table, summed, known, 1e-8 if batch_eps is None else batch_eps)
    elif whiten != "none":
        raise UserError(f"whiten {whiten!r} is not known; use {', '.join(get_args(Whiten))}")
    values = divided(torch.where(known, summed - mean, 0.0), deviation)
    if table.penalty is not None:
        penalty = torch.where(known, table.penalty, torch.nan)
        values = values - table.centred(penalty, table.stats(penalty))
    active = len(set(table.group_of[summed != 0].tolist()))
    warning = FEW_GROUPS if whiten != "none" and table.groups and active < 2 else ""
    return Decoupled(each=each, summed=summed, deviation=deviation, values=values, warning=warning)


FEW_GROUPS = (
    "fewer than two groups of a batch have a signal: normalising over the batch then undoes how strong it is; use more "
    "prompts a batch (data.batch_size), or replace dead groups (model.dynamic_sampling)"
)


def _summed(table: RewardTable, terms: Tensor) -> Tensor:
    """[N, K] -> [N] sums, exactly 0 where terms cancel but for rounding: of the rewards in a whole group, of the
    arithmetic in a completion."""
    total = terms.sum(1)
    size = table.largest(terms.abs().sum(1))
    silent = table.largest(total.abs()) <= FLAT * size
    return torch.where(silent[table.group_of] | (total.abs() <= 1e-12 * size[table.group_of]), 0.0, total)


def _over_tokens(table: RewardTable, summed: Tensor, known: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(mean, deviation) of a value per completion over the tokens of all of them, ddof 1; deviation 0 if there is no
    variance."""
    if table.lengths is None:
        raise ValueError("whiten 'token' needs the lengths of the completions: RewardTable(lengths=...)")
    tokens = torch.where(known, table.lengths, 0).to(summed.dtype)
    count = tokens.sum()
    mean = (tokens * summed).sum() / count.clamp(min=1)
    variance = (tokens * (summed - mean) ** 2).sum() / (count - 1).clamp(min=1)
    return mean, torch.where(variance > 0, (variance + eps).sqrt(), 0.0)


# ---------------------------------------------------------------------- over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """What an estimator made of this rank's completions.

    Args:
        values: [N] float32, exactly 0 where `valid` is false.
        valid: [N] bool: some reward applied. Other completions must not be trained on.
        active: [P] bool: some advantage of the group is not 0. Groups that are not can be skipped without changing the
            gradient of a loss that has no other term.
        informative: [P, K] bool: the reward differs within the group. What dynamic sampling goes by: two rewards that
            cancel in the sum still are a signal.
        warning: what is wrong with the batch as a whole, "" if nothing.
        parts: what `values` were made of, from an estimator that says so.
    """

    values: Tensor
    valid: Tensor
    active: Tensor
    informative: Tensor
    warning: str
    parts: Decoupled | None


def estimate(estimator: Estimator, table: RewardTable) -> Advantages:
    """Advantages of this rank's completions, from the rewards of all ranks. A collective: every rank calls it, also
    with an empty table. Computed in float64, so that neither ranks nor their number show.

    Raises ValueError when the estimator does not return one number per completion.
    """
    whole, rows, groups = all_ranks(table)
    found = estimator(whole)
    parts = found if isinstance(found, Decoupled) else None
    values = found.values if isinstance(found, Decoupled) else found
    if values.shape != whole.group_of.shape:
        raise ValueError(
            f"the advantage estimator returned {tuple(values.shape)} for {len(whole.group_of)} completions; it must "
            "return one number per completion"
        )
    valid = ~whole.rewards.isnan().all(1)
    values = torch.where(valid, values, 0.0)
    active = torch.zeros(whole.groups, dtype=torch.bool)
    active[whole.group_of[values != 0]] = True
    counts = whole.stats(whole.scores).count
    alone = whole.groups > 0 and bool((counts < 2).all())
    warning = "no group has two completions with a reward, so every advantage is 0: sample more" if alone else ""
    device = table.rewards.device
    return Advantages(
        values=values[rows].float().to(device),
        valid=valid[rows].to(device),
        active=active[groups].to(device),
        informative=whole.informative()[groups].to(device),
        warning=warning or (parts.warning if parts is not None else ""),
        parts=None if parts is None else _of_rows(parts, rows, device),
    )


def _of_rows(parts: Decoupled, rows: slice, device: torch.device) -> Decoupled:
    """In float32, of these completions."""
    mine = {name: getattr(parts, name)[rows].float().to(device) for name in ("each", "summed", "values")}
    return replace(parts, **mine, deviation=parts.deviation.float().to(device))


def all_ranks(table: RewardTable) -> tuple[RewardTable, slice, slice]:
    """(the table of all ranks in float64 on the CPU, this rank's rows of it, this rank's groups of it)."""
    mine = replace(
        table,
        rewards=table.rewards.double().cpu(),
        weights=table.weights.double().cpu(),
        group_of=table.group_of.cpu(),
        penalty=None if table.penalty is None else table.penalty.double().cpu(),
        lengths=None if table.lengths is None else table.lengths.cpu(),
    )
    parts: list[RewardTable] = distributed.all_gather_objects(mine)  # type: ignore[assignment]
    before = parts[: distributed.rank()]
    row, first = sum(len(p.group_of) for p in before), sum(p.groups for p in before)
    offsets = [sum(p.groups for p in parts[:i]) for i in range(len(parts))]
    whole = replace(
        mine,
        rewards=torch.cat([p.rewards for p in parts]),
        group_of=torch.cat([p.group_of + offset for p, offset in zip(parts, offsets, strict=True)]),
        groups=sum(p.groups for p in parts),
        penalty=_joined([p.penalty for p in parts]),
        lengths=_joined([p.lengths for p in parts]),
    )
    return whole, slice(row, row + len(mine.group_of)), slice(first, first + table.groups)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """What every rank has or none has."""
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])
