"""What GeneralizedRPO adds to a preference loss, as modules use it: settings, denominators and values of both terms.

A denominator is known from the masks alone, over the whole batch and all ranks, before anything is computed; so a term
is a mean over the batch's tokens, whatever the micro-batches and ranks are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.entropy_deficit import Floor, Scope, check_floor, check_scope, entropy_deficit, floor_of, token_scope
from alignment.full_kl import Head
from alignment.logprobs import TokenStats
from alignment.smoothness import Smoothness, check_smoothness, smooth_values, smooth_weights
from alignment.update import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class TermCounts(Counts):
    """Counts, and the denominators of what they lack.

    Args:
        entropy: sum of the weights of tokens in the scope of R_entropy. smooth: of the values in that of R_smooth.
        domains: domain -> sum of the weights of its pairs; empty where domains are not weighted.
    """

    entropy: float
    smooth: float
    domains: Mapping[str, float] = field(default_factory=dict)


UNIT_TERMS = TermCounts(prompts=1.0, rows=1.0, tokens=1.0, entropy=1.0, smooth=1.0)
"""Counts under which plain sums come out, for evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of a micro-batch: values [K] of at least 0, their weights [K], and the pair of each [K]."""

    values: Tensor
    weights: Tensor
    pair: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularisers:
    """R_entropy and R_smooth under their settings; see `modules.GeneralizedRPO`. Raises UserError for wrong ones."""

    floor: Floor
    level: float | None
    entropy_scope: Scope
    smoothness: Smoothness
    smooth_scope: Scope

    def __post_init__(self) -> None:
        check_floor(self.floor, self.level)
        check_scope("entropy_scope", self.entropy_scope)
        check_smoothness(self.smoothness)
        check_scope("smooth_scope", self.smooth_scope)

    def counts(self, batch: GroupBatch, domains: Mapping[str, float]) -> TermCounts:
        """Of this batch over all ranks. A collective."""
        base = Counts.of(batch)
        weights = token_scope(batch, self.entropy_scope), smooth_weights(self.smoothness, batch, self.smooth_scope)
        entropy, smooth = distributed.all_reduce_sum(torch.stack([w.double().sum() for w in weights])).tolist()
        return TermCounts(
            prompts=base.prompts, rows=base.rows, tokens=base.tokens, entropy=entropy, smooth=smooth, domains=domains
        )

    def entropy(self, batch: GroupBatch, normalised: Tensor, vocabulary: int) -> Term:
        """The deficit of each token. `normalised` [C]: entropy over log V."""
        values = entropy_deficit(normalised, floor_of(self.floor, self.level, batch, vocabulary))
        return Term(
            values=values, weights=token_scope(batch, self.entropy_scope), pair=batch.group_of[batch.row_of()]
        )

    def smooth(
        self, batch: GroupBatch, stats: TokenStats, normalised: Tensor, head: Head | None, *, off: bool = False
    ) -> Term:
        """The jump at each token, or the variance of each completion.

        Args:
            head: for js, with states in `stats`. off: js is 0, since its price would be paid for a metric alone.
        """
        assert stats.logps is not None
        if off and self.smoothness == "js":
            values = torch.zeros_like(stats.logps)
        else:
            values = smooth_values(self.smoothness, batch, stats.logps, normalised, stats.hidden, head)
        weights = smooth_weights(self.smoothness, batch, self.smooth_scope)
        by_row = self.smoothness == "variance"
        return Term(values=values, weights=weights, pair=batch.group_of if by_row else batch.group_of[batch.row_of()])


def normalised_entropy(entropy: Tensor, vocabulary: int) -> Tensor:
    """Nats -> share of log V, in [0, 1]."""
    return entropy / math.log(vocabulary)
