"""Metrics of a batch's rewards and advantages, under TRL's names where TRL has one.

reward, reward_std                 mean of the summed scores; mean over groups of their deviation within the group
rewards/NAME/mean, .../std         of one reward, over the completions it applies to; no deviation of fewer than two
reward_length_slope                slope of the score on the length in tokens among the completions of a prompt: the
                                   reward that a token more goes with. Left out where lengths do not differ
frac_reward_zero_std               share of groups whose summed score does not differ within the group
adv/zero_std/NAME                  the same for one reward: what collapses when rewards are summed shows here
adv/active_groups                  groups with an advantage that is not 0
adv/distinct                       distinct advantages in a group, mean over groups
adv/batch_std                      deviation of the advantages over the batch
adv/corr/NAME                      correlation of the advantages with the reward's own group-normalised values, over the
                                   completions it applies to
adv/before/abs_mean, .../abs_max   size of the advantages before they were normalised over the batch, where they are;
adv/after/abs_mean, .../abs_max    and after it. `active_groups` and `batch_std` are then of those before.
strata/LABEL/reward, .../zero_std, .../share
                                   per difficulty: mean score, share of groups without signal, share of the groups

Those that compare the completions of a prompt are left out where every prompt has one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alignment import distributed
from alignment.advantages import RewardTable, all_ranks, spread
from alignment.metrics import Metrics

_WITHIN = frozenset(("frac_reward_zero_std", "reward_length_slope", "zero_std", "distinct"))
"""Parts of the names of metrics that compare the completions of a prompt."""


def reward_metrics(
    table: RewardTable,
    values: Tensor,
    names: Sequence[str],
    strata: Sequence[str] | None = None,
    before: Tensor | None = None,
) -> Metrics:
    """Metrics over all ranks, the same on each. A collective: every rank calls it, also with an empty table.

    Args:
        values: [N] advantages. names: K names of rewards. strata: P labels of this rank's groups.
        before: [N] the advantages before normalisation over the batch, where there is one; on every rank or on none.
    """
    whole = all_ranks(table)[0]
    if not whole.groups:
        return {}
    steps = [step.double().cpu() for step in (values, values if before is None else before)]
    parts: Any = distributed.all_gather_objects((steps, list(strata or ())))
    advantages, first = (torch.cat(step) for step in zip(*(part[0] for part in parts), strict=True))
    labels = [label for part in parts for label in part[1]]
    scores = whole.scores
    stats = whole.stats(scores)
    known = stats.count > 1
    out = {
        "reward": _mean(scores),
        "reward_std": _mean(stats.std[known]),
        "reward_length_slope": _length_slope(whole),
        "frac_reward_zero_std": _mean(stats.flat.double()),
        **_advantages(whole, advantages, first),
    }
    if before is not None and not scores.isnan().all():
        out |= _sizes("before", first[~scores.isnan()]) | _sizes("after", advantages[~scores.isnan()])
    for name, reward in zip(names, whole.rewards.T, strict=True):
        own = whole.stats(reward)
        out[f"rewards/{name}/mean"] = _mean(reward)
        out[f"rewards/{name}/std"] = _deviation(reward)
        out[f"adv/zero_std/{name}"] = _mean(own.flat.double())
        applies = ~reward.isnan()
        out[f"adv/corr/{name}"] = _correlation(whole.normalised(reward, 1e-4)[applies], advantages[applies])
    out |= _strata(whole, labels)
    if int(whole.group_of.bincount(minlength=1).max()) < 2:  # a completion alone, as PPO samples it
        out = {name: value for name, value in out.items() if not _WITHIN & set(name.split("/"))}
    one = torch.ones((), dtype=torch.float64)
    return {name: (value, one) for name, value in out.items() if not value.isnan()}


def _advantages(whole: RewardTable, values: Tensor, before: Tensor) -> dict[str, Tensor]:
    scored = ~whole.scores.isnan()
    rounded = torch.stack([whole.group_of.double(), (values * 1e6).round()], dim=1)[scored]
    distinct = torch.unique(rounded, dim=0)
    active = torch.zeros(whole.groups, dtype=torch.float64)
    active[whole.group_of[before != 0]] = 1.0
    return {
        "adv/active_groups": active.sum(),
        "adv/distinct": torch.tensor(len(distinct) / whole.groups, dtype=torch.float64),
        "adv/batch_std": _deviation(before[scored]),
    }


def _length_slope(whole: RewardTable) -> Tensor:
    """Least squares over the completions with a score, both sides less their group's mean; NaN without a difference."""
    scores = whole.scores
    if whole.lengths is None:
        return scores.new_full((), torch.nan)
    lengths = torch.where(scores.isnan(), torch.nan, whole.lengths.double())
    centred = [(v - whole.stats(v).mean[whole.group_of])[~scores.isnan()] for v in (scores, lengths)]
    squares = (centred[1] ** 2).sum()
    return (centred[0] * centred[1]).sum() / squares if squares > 0 else scores.new_full((), torch.nan)


def _sizes(step: str, values: Tensor) -> dict[str, Tensor]:
    return {f"adv/{step}/abs_mean": values.abs().mean(), f"adv/{step}/abs_max": values.abs().max()}


def _strata(whole: RewardTable, labels: Sequence[str]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    scores = whole.scores
    flat = whole.stats(scores).flat.double()
    for label in sorted(set(labels)):
        mine = torch.tensor([other == label for other in labels])
        out[f"strata/{label}/reward"] = _mean(scores[mine[whole.group_of]])
        out[f"strata/{label}/zero_std"] = _mean(flat[mine])
        out[f"strata/{label}/share"] = mine.double().mean()
    return out


def _mean(values: Tensor) -> Tensor:
    """Over what is not NaN; NaN when nothing is."""
    return values[~values.isnan()].mean()


def _deviation(values: Tensor) -> Tensor:
    """Over what is not NaN; NaN below two values."""
    return spread(values) if (~values.isnan()).sum() > 1 else values.new_full((), torch.nan)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(), b - b.mean()
    scale = (a**2).sum().sqrt() * (b**2).sum().sqrt()
    return (a * b).sum() / scale if scale > 0 else torch.full_like(scale, torch.nan)
