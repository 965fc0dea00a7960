"""Sampled completions on their way from a rollout to an update: one GroupBatch that gathers what is known of it.

Row tensors [N]     `reward/NAME` each reward, NaN where it abstained; `truncated` 1 where the length limit ended it;
                    `advantage` what the algorithm made of the rewards; `advantage_before` what that was before
                    normalisation over the batch, where rewards are normalised apart
Token tensors [C]   `sampler_logps`; `ref_logps`; those of `alignment.objective`; an algorithm's own (values, returns)

So whatever cuts a batch (minibatches, micro-batches, dynamic sampling) cuts all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from alignment import distributed
from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.metrics import Metrics, mean_of
from alignment.policy_losses import explained_variance
from alignment.prompting import SEAT, strata_of
from alignment.rewards.matrix import RewardMatrix
from alignment.rewards.protocol import Texts
from alignment.sharding import in_step

TRUNCATED = "truncated"
ADVANTAGE = "advantage"
BEFORE = "advantage_before"
REF_LOGPS = "ref_logps"
ENTROPY = "entropy"

_REWARD = "reward/"
_PLACE = "place"


def with_rewards(batch: GroupBatch, matrix: RewardMatrix) -> GroupBatch:
    """A copy that carries what the rewards gave."""
    columns = matrix.values.to(batch.device).unbind(dim=1)
    return batch.with_rows(**{_REWARD + name: column for name, column in zip(matrix.names, columns, strict=True)})


def reward_of(batch: GroupBatch, name: str) -> Tensor:
    """[N] one reward, NaN where it abstained."""
    return batch.rows[_REWARD + name]


def table_of(batch: GroupBatch, names: Sequence[str], weights: Tensor) -> RewardTable:
    """What advantage estimators see of this rank's completions."""
    return RewardTable(
        rewards=torch.stack([reward_of(batch, name) for name in names], dim=1),
        weights=weights.to(batch.device),
        group_of=batch.group_of,
        groups=batch.num_prompts,
        lengths=batch.scored_lengths(),
    )


def unscored(batch: GroupBatch, rows: Tensor) -> GroupBatch:
    """A copy in which no token of the completions where `rows` [N] is true is scored."""
    return replace(batch, scored=batch.scored & ~rows[batch.row_of()])


def minibatches(batch: GroupBatch, parts: int) -> Iterator[GroupBatch]:
    """`parts` batches of consecutive groups, as even as can be over all ranks; some are empty when there are fewer
    groups. A collective.

    Ranks hold every w-th group of the global batch, so that taking one of each in turn is the global order; after
    dynamic sampling, which drops some, the order is that of their seats. So each minibatch is the one that a single
    process would make.
    """
    if parts == 1:
        yield batch
        return
    seats: Any = distributed.all_gather_objects(_seats(batch))
    order = [rank for _, rank in sorted((seat, rank) for rank, mine in enumerate(seats) for seat in mine)]
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    for first, end in pairwise(order[:cut].count(distributed.rank()) for cut in cuts):
        yield batch.select_groups(list(range(first, end)))


def _seats(batch: GroupBatch) -> list[int]:
    """P numbers, rising, that put the groups of all ranks in order together with their ranks'."""
    if SEAT not in batch.rows:
        return list(range(batch.num_prompts))
    return sorted(set(batch.rows[SEAT].long().tolist()))


def without_signal(batch: GroupBatch, signal: str = ADVANTAGE) -> GroupBatch:
    """The completions with a scored token whose row value `signal` is not 0; all of them when no rank has any, so that
    the gradient is 0 and not missing. A collective. Exact for losses that are proportional to the advantage, with the
    counts of the whole."""
    live = (batch.rows[signal] != 0) & (batch.scored_lengths() > 0)
    if not distributed.any_rank(bool(live.any()), batch.device):
        return batch
    return batch.select_rows(live.nonzero()[:, 0])


def per_token(
    batch: GroupBatch,
    compute: Callable[[GroupBatch], Mapping[str, Tensor]],
    max_tokens: int | None,
    model: nn.Module | None = None,
) -> dict[str, Tensor]:
    """Token tensors [C] of a whole batch, computed without gradient in micro-batches of at most `max_tokens`.

    `model` is what `compute` runs: a collective where it is sharded.
    """
    out: dict[str, Tensor] = {}
    places = torch.arange(len(batch.completion_ids), device=batch.device)
    with torch.no_grad():
        batch = batch.with_tokens(**{_PLACE: places})
        micros = batch.split(max_tokens, keep_groups=False)
        for micro in micros if model is None else in_step(model, micros, batch):
            for name, values in compute(micro).items():
                whole = out.setdefault(name, values.new_zeros(len(places)))
                whole[micro.tokens[_PLACE]] = values
    return out


# ------------------------------------------------------------------------------------------------ what people read


def completion_metrics(batch: GroupBatch) -> Metrics:
    """Lengths in tokens under TRL's names, over all ranks. A collective: every rank calls it.

    completions/mean_length, min_length, max_length    of all completions
    completions/mean_terminated_length                 of those that ended by themselves
    completions/clipped_ratio                          share that the length limit ended
    completions/repetition                             see `repetition`; of those with at least two 4-grams
    """
    lengths, cut = batch.completion_lengths.double().cpu(), batch.rows[TRUNCATED].bool().cpu()
    parts: Any = distributed.all_gather_objects((lengths.tolist(), cut.tolist()))
    everyone = [length for part in parts for length in part[0]]
    metrics: Metrics = {
        "completions/mean_length": mean_of(lengths),
        "completions/mean_terminated_length": mean_of(lengths, ~cut),
        "completions/clipped_ratio": mean_of(cut.double()),
        "completions/repetition": mean_of(*repetition(batch)),
    }
    if everyone:
        one = torch.ones((), dtype=torch.float64)
        for name, value in (("min", min(everyone)), ("max", max(everyone))):
            metrics[f"completions/{name}_length"] = (torch.tensor(value, dtype=torch.float64), one)
    return metrics


def repetition(batch: GroupBatch, n: int = 4) -> tuple[Tensor, Tensor]:
    """([N] share of a completion's n-grams of token ids that repeat an earlier one of it, [N] whether it has at least
    two). Welleck et al. 2020 (arXiv 1908.04319), seq-rep-n: 0.005 for human text, near 1 for a word over and over."""
    ids, row_of, lengths = batch.completion_ids.cpu(), batch.row_of().cpu(), batch.completion_lengths.cpu()
    starts = max(0, len(ids) - n + 1)
    inside = row_of[:starts] == row_of[len(ids) - starts :]  # an n-gram begins and ends in one completion
    # A number for each n-gram of each completion, by a hash that wraps around: two share one once in 2^63 pairs.
    key = row_of[:starts].clone()
    for i in range(n):
        key = key * 6364136223846793005 + 1442695040888963407 + ids[i : i + starts]
    row_of = row_of[:starts][inside]
    distinct, place = torch.unique(key[inside], return_inverse=True)
    owner = torch.zeros_like(distinct).scatter(0, place, row_of)
    grams, different = (rows.bincount(minlength=batch.num_completions) for rows in (row_of, owner))
    return (grams - different) / grams.clamp(min=1), lengths > n


def return_metrics(
    batch: GroupBatch, scores: Tensor, rewards: Tensor, values: Tensor, returns: Tensor, logps: Tensor
) -> Metrics:
    """Of an actor-critic's rollout, under TRL's names. A collective: give it the whole batch.

        objective/scores             mean score of a completion
        objective/non_score_reward   mean of what its tokens got besides, in sum: -beta KL
        objective/rlhf_reward        both
        objective/entropy            mean over completions of minus their log-prob
        explained_variance           1 - Var(R - V) / Var(R)

    Args:
        scores: [N], NaN where there is none. rewards, values, returns, logps: [C].
    """
    spoken = batch.scored_lengths() > 0
    total, score = batch.sum_tokens(rewards), scores.nan_to_num()
    one = torch.ones((), dtype=torch.float64)
    explained = explained_variance(values, returns, batch.scored)
    return {
        "objective/scores": mean_of(score, spoken),
        "objective/non_score_reward": mean_of(total - score, spoken),
        "objective/rlhf_reward": mean_of(total, spoken),
        "objective/entropy": mean_of(-batch.sum_tokens(logps), spoken),
        **({} if math.isnan(explained) else {"explained_variance": (one * explained, one)}),
    }


def evaluation_metrics(batch: GroupBatch, matrix: RewardMatrix) -> Metrics:
    """Of one evaluated batch: `reward` (the weighted sum), each reward's mean, abstentions and faults, lengths, and
    `strata/LABEL/reward`."""
    total = matrix.total().to(batch.device)
    known = ~total.isnan()
    # The deviation within a batch is no mean over batches.
    metrics: Metrics = {name: pair for name, pair in matrix.metrics().items() if not name.endswith("/std")}
    metrics["reward"] = mean_of(total, known)
    metrics["completions/mean_length"] = mean_of(batch.completion_lengths)
    metrics["completions/clipped_ratio"] = mean_of(batch.rows[TRUNCATED])
    labels = strata_of(batch)
    for label in sorted(set(labels) - {""}):
        mine = torch.tensor([other == label for other in labels], device=batch.device)[batch.group_of]
        metrics[f"strata/{label}/reward"] = mean_of(total, known & mine)
    return metrics


def sample_rows(batch: GroupBatch, matrix: RewardMatrix, texts: Texts) -> list[dict[str, Any]]:
    """N mappings: what was sampled for which prompt, and what each reward said. None stands for an abstention."""
    labels, totals, values = strata_of(batch), matrix.total().tolist(), matrix.values.tolist()
    return [
        {
            "index": int(batch.group_index[group]),
            "stratum": labels[group],
            "prompt": texts.prompts[group],
            "completion": texts.completions[row],
            "truncated": bool(batch.rows[TRUNCATED][row]),
            "reward": _number(totals[row]),
            "rewards": {name: _number(value) for name, value in zip(matrix.names, values[row], strict=True)},
        }
        for row, group in enumerate(batch.group_of.tolist())
    ]


def _number(value: float) -> float | None:
    return None if value != value else value
