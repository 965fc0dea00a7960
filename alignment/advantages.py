"""Advantages from rewards: group-relative estimators over completions, and GAE over tokens.

A group-relative estimator is a function `RewardTable -> [N]`. To add one, write it and name it in YAML by its import
path (`model.advantage: my_file.my_advantage`), or register it with `@ADVANTAGES.register("name")`.

Rules for every estimator:
* NaN means that a reward did not apply. It is left out of sums, means and deviations; it is never 0. A completion
  without any reward has advantage 0, is not trained on (`Advantages.valid`) and is in no statistic.
* A group with fewer than two scores, or whose scores are all alike (max - min <= 1e-6 max(1, |mean|)), has advantage
  exactly 0: dividing rounding errors by a small deviation would invent a signal.
* Deviations are unbiased (ddof 1). Statistics of the batch are over all ranks, before any cut into mini-batches.

Shapes: P groups, N completions, K rewards, C tokens (legend of `alignment.batches`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
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
    """

    rewards: Tensor
    weights: Tensor
    group_of: Tensor
    groups: int

    def __post_init__(self) -> None:
        n, k = self.rewards.shape
        if self.weights.shape != (k,) or self.group_of.shape != (n,):
            raise ValueError(
                f"rewards are {n} completions by {k} rewards; weights {tuple(self.weights.shape)} and group_of "
                f"{tuple(self.group_of.shape)} do not fit"
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
        """[N] weighted sum of the rewards that apply, NaN where none does."""
        applies = ~self.rewards.isnan()
        total = torch.where(applies, self.rewards * self.weights, 0.0).sum(1)
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


Estimator = Callable[..., Tensor]
"""fn(table: RewardTable, *, settings) -> [N] advantages; whatever it returns for a completion without reward is 0."""

ADVANTAGES: Registry[Estimator] = Registry("advantage")


def spread(values: Tensor) -> Tensor:
    """[N] with NaN -> 0-dim unbiased std over the values that are not NaN; 0 below two of them."""
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else values.new_zeros(())


# ---------------------------------------------------------------------- group-relative estimators


@ADVANTAGES.register("group")
def group(table: RewardTable, *, eps: float = 1e-4) -> Tensor:
    """(s - mean_g) / (std_g + eps): GRPO, Shao et al. 2024 (arXiv 2402.03300); eps as in TRL, 1e-6 in verl."""
    scores = table.scores
    stats = table.stats(scores)
    return table.centred(scores, stats) / (stats.std + eps)[table.group_of]


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
    return table.centred(scores, table.stats(scores)) / (spread(scores) + eps)


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
        raise ValueError(f"scale {scale!r} is not known; use none, group or batch")
    return (values / (deviation + eps)).clamp(-SCALED_BOUND, SCALED_BOUND)


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(table: RewardTable, *, eps: float = 1e-8) -> Tensor:
    """(s - mean_g) / sqrt(variance of that over the batch + eps): REINFORCE++-baseline, Hu et al. 2025
    (arXiv 2501.03262), whitened over completions.

    verl whitens over tokens, so that long completions weigh more and groups without signal get an advantage; here the
    mean of the centred scores is 0 by construction and is not subtracted again.
    """
    scores = table.scores
    values = table.centred(scores, table.stats(scores))
    return values / (spread(torch.where(scores.isnan(), torch.nan, values)) ** 2 + eps).sqrt()


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
    """

    values: Tensor
    valid: Tensor
    active: Tensor
    informative: Tensor
    warning: str


def estimate(estimator: Estimator, table: RewardTable) -> Advantages:
    """Advantages of this rank's completions, from the rewards of all ranks. A collective: every rank calls it, also
    with an empty table. Computed in float64, so that neither ranks nor their number show.

    Raises ValueError when the estimator does not return one number per completion.
    """
    whole, rows, groups = all_ranks(table)
    values = estimator(whole)
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
    device = table.rewards.device
    return Advantages(
        values=values[rows].float().to(device),
        valid=valid[rows].to(device),
        active=active[groups].to(device),
        informative=whole.informative()[groups].to(device),
        warning="no group has two completions with a reward, so every advantage is 0: sample more" if alone else "",
    )


def all_ranks(table: RewardTable) -> tuple[RewardTable, slice, slice]:
    """(the table of all ranks in float64 on the CPU, this rank's rows of it, this rank's groups of it)."""
    mine = (table.rewards.double().cpu(), table.group_of.cpu(), table.groups)
    parts: list[tuple[Tensor, Tensor, int]] = distributed.all_gather_objects(mine)  # type: ignore[assignment]
    before = parts[: distributed.rank()]
    row, first = sum(len(p[1]) for p in before), sum(p[2] for p in before)
    offsets = [sum(p[2] for p in parts[:i]) for i in range(len(parts))]
    whole = RewardTable(
        rewards=torch.cat([p[0] for p in parts]),
        weights=table.weights.double().cpu(),
        group_of=torch.cat([p[1] + offset for p, offset in zip(parts, offsets, strict=True)]),
        groups=sum(p[2] for p in parts),
    )
    return whole, slice(row, row + len(mine[1])), slice(first, first + table.groups)


# ---------------------------------------------------------------------- tokens


def token_rewards(batch: GroupBatch, scores: Tensor, penalty: Tensor | None = None) -> Tensor:
    """[N] scores -> [C] rewards: each score on the last scored token of its completion, minus `penalty` [C] (for
    example beta k1) on every scored token; 0 elsewhere. A NaN score adds nothing, an empty completion has no place.
    """
    rewards = torch.zeros(len(batch.completion_ids), dtype=torch.float32, device=batch.device)
    if penalty is not None:
        rewards = torch.where(batch.scored, rewards - penalty, rewards)
    place = torch.where(batch.scored, torch.arange(len(rewards), device=batch.device), -1)
    last = torch.full((batch.num_completions,), -1, dtype=torch.int64, device=batch.device)
    last = last.scatter_reduce(0, batch.row_of(), place, "amax")
    used = (last >= 0) & ~scores.isnan()
    return rewards.index_add(0, last[used], scores[used].to(rewards.dtype))


def gae(
    batch: GroupBatch, rewards: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every scored token, each [C] float32 and 0 at unscored tokens.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    t + 1 is the next *scored* token of the completion; after the last one V and A are 0. Schulman et al. 2016
    (arXiv 1506.02438).

    Args:
        rewards: [C]. values: [C], the value of the state before each token; anything at unscored tokens.
    """
    lengths = batch.scored_lengths()
    width = int(lengths.max()) if len(lengths) else 0
    row = batch.row_of()[batch.scored]
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(len(row), device=batch.device) - starts[row]
    grid = torch.zeros(2, width + 1, batch.num_completions, dtype=torch.float64, device=batch.device)
    grid[0, column, row] = rewards.detach()[batch.scored].double()
    grid[1, column, row] = values.detach()[batch.scored].double()
    reward, value = grid
    advantage = torch.zeros_like(value)
    for t in reversed(range(width)):  # beyond a completion's end the grid holds 0: what follows its last token
        delta = reward[t] + gamma * value[t + 1] - value[t]
        advantage[t] = delta + gamma * lam * advantage[t + 1]
    return _place(batch, advantage[column, row]), _place(batch, (advantage + value)[column, row])


def _place(batch: GroupBatch, scored_values: Tensor) -> Tensor:
    out = torch.zeros(len(batch.completion_ids), dtype=torch.float32, device=batch.device)
    out[batch.scored] = scored_values.float()
    return out


def whiten(values: Tensor, scored: Tensor, *, eps: float = 1e-8) -> Tensor:
    """[C] -> (values - mean) / sqrt(var + eps) over the scored tokens of all ranks (ddof 1), 0 elsewhere. A collective.

    Equal values and a single value give 0.
    """
    kept = torch.where(scored, values, 0.0).double()
    count, total = distributed.all_reduce_sum(torch.stack([scored.sum().double(), kept.sum()]))
    mean = total / count.clamp(min=1)
    centred = torch.where(scored, kept - mean, 0.0)
    squares, largest = distributed.all_reduce_sum((centred**2).sum()), centred.abs().max() if len(centred) else mean * 0
    flat = not distributed.any_rank(bool(largest > FLAT * mean.abs().clamp(min=1)), values.device)
    variance = squares / (count - 1).clamp(min=1)
    return torch.zeros_like(values) if flat else (centred / (variance + eps).sqrt()).to(values.dtype)
