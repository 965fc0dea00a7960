"""Domains of preference pairs: settings of their own, metrics of their own, and weights that follow their losses.

A data column names the domain of each pair. A domain may have its own beta and lambdas; where it has none the general
value holds, and whatever moves the general value during training moves the domain's by the same factor.

Adaptive weights are group DRO (Sagawa et al. 2020, arXiv 1911.08731, algorithm 1): the loss is that of the worst
mixture of domains, which exponentiated gradient ascent looks for,

    L = sum_d q_d L_d,      q_d <- q_d exp(eta L_d) / Z          L_d: mean preference loss of the batch's pairs of d

over the whole batch and all ranks. Deviations: a batch is weighted by the q that earlier batches left, which is the
simultaneous form of the ascent and needs no second pass over the batch; and a batch that lacks a domain leaves that
domain's weight as it is (with L_d = 0 in the formula it would lose weight for being rare).

Legend: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.losses import weighted
from alignment.metrics import Metrics

PREFIX = "domain"


@dataclass(kw_only=True)
class DomainConfig:
    """What domains have of their own.

    Args:
        column: data column that names each pair's domain.
        beta: domain -> beta. lambda_entropy, lambda_smooth: domain -> weight of the term. A domain that is not named
            has the general value.
        adaptive: weigh domains by group DRO instead of by their pairs.
        step_size: eta of the weights' ascent; 0.01 in the authors' code.
    """

    column: str = "domain"
    beta: dict[str, float] = field(default_factory=dict)
    lambda_entropy: dict[str, float] = field(default_factory=dict)
    lambda_smooth: dict[str, float] = field(default_factory=dict)
    adaptive: bool = False
    step_size: float = 0.01

    def __post_init__(self) -> None:
        for what, values in self.own.items():
            for name, value in values.items():
                if not 0 <= value < math.inf or (what == "beta" and value == 0):
                    least = "be positive" if what == "beta" else "not be negative"
                    raise UserError(f"domains.{what} of '{name}' is {value}; it must {least}")
        if not 0 < self.step_size < math.inf:
            raise UserError(f"domains.step_size is {self.step_size}; it must be positive")

    @property
    def own(self) -> dict[str, dict[str, float]]:
        """Setting -> domain -> its own value."""
        return {"beta": self.beta, "lambda_entropy": self.lambda_entropy, "lambda_smooth": self.lambda_smooth}


class Domains:
    """Domains under one DomainConfig.

    Attributes:
        weights: domain -> q, summing to 1 over the domains known so far; with `adaptive` only.
    """

    def __init__(self, config: DomainConfig) -> None:
        self.config = config
        self.weights: dict[str, float] = {}

    def name(self, index: int, columns: Mapping[str, Any], row: str = "row") -> str:
        """The domain of a row. Raises UserError for one without, which calls it a `row`."""
        value = columns.get(self.config.column)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise UserError(
                f"{row} {index} has {value!r} in column '{self.config.column}', which domains.column names; every pair "
                "needs the name of its domain there"
            )
        return str(value)

    def names(self, batch: GroupBatch) -> list[str]:
        """P names."""
        columns = batch.columns or ({},) * batch.num_prompts
        return [self.name(index, row) for index, row in zip(batch.group_index.tolist(), columns, strict=True)]

    def read(self, rows: Iterable[Group], held_out: Iterable[Group] = ()) -> None:
        """Know the domains of the training rows. Raises UserError for a row without one, also a validation row of those
        held out, and for settings of a domain that no training row is of."""
        there = sorted({self.name(row.index, row.columns) for row in rows})
        for row in held_out:
            self.name(row.index, row.columns, "validation row")
        for what, values in self.config.own.items():
            if absent := sorted(set(values) - set(there)):
                raise UserError(
                    f"domains.{what} names '{absent[0]}', and column '{self.config.column}' of the training rows has "
                    f"{', '.join(there)}"
                )
        if self.config.adaptive:
            self.know(there)

    def values(self, batch: GroupBatch, what: str, general: float, configured: float) -> float | Tensor:
        """The value of a setting for each pair [P], or one for all where no domain has its own.

        Args:
            what: beta, lambda_entropy or lambda_smooth. general: the value of the others, as it is now. configured: as
                it was set.
        """
        own = self.config.own[what]
        if not own:
            return general
        moved = general / configured if configured else 1.0
        values = [own[name] * moved if name in own else general for name in self.names(batch)]
        return torch.tensor(values, dtype=torch.float32, device=batch.device)

    def metrics(self, batch: GroupBatch, weights: Tensor, **values: Tensor) -> Metrics:
        """`domain/NAME/WHAT`: the mean of each [P] tensor over the pairs of a domain, which weigh `weights` [P]."""
        names = self.names(batch)
        out: Metrics = {}
        for name in sorted(set(names)):
            mine = torch.tensor([n == name for n in names], device=batch.device)
            for what, value in values.items():
                out[f"{PREFIX}/{name}/{what}"] = weighted(value[mine], weights[mine])
        return out

    # ------------------------------------------------------------------ adaptive weights

    def know(self, names: Iterable[str]) -> None:
        """Add domains that are new, each with the average weight."""
        for name in sorted(set(names) - set(self.weights)):
            count = len(self.weights)
            self.weights = {n: q * count / (count + 1) for n, q in self.weights.items()} | {name: 1 / (count + 1)}

    def counts(self, batch: GroupBatch, weights: Tensor) -> dict[str, float]:
        """Domain -> sum of the weights [P] of its pairs over all ranks; new domains become known. Empty unless weights
        are adaptive. A collective."""
        if not self.config.adaptive:
            return {}
        names = self.names(batch)
        self.know(distributed.union_of_names(set(names)))
        order = sorted(self.weights)
        sums = torch.zeros(len(order), dtype=torch.float64, device=batch.device)
        at = torch.tensor([order.index(name) for name in names], dtype=torch.int64, device=batch.device)
        sums.index_add_(0, at, weights.double())
        return dict(zip(order, distributed.all_reduce_sum(sums).tolist(), strict=True))

    def factors(self, batch: GroupBatch, counts: Mapping[str, float]) -> Tensor:
        """[P] q_d n / n_d: what makes a mean over n pairs the sum of q_d times the means over domains. `counts` are
        n_d of the whole batch."""
        total = sum(counts.values())
        factor = {name: self.weights[name] * total / count for name, count in counts.items() if count > 0}
        values = [factor.get(name, 0.0) for name in self.names(batch)]
        return torch.tensor(values, dtype=torch.float32, device=batch.device)

    def learn(self, metrics: Metrics, device: torch.device) -> None:
        """`observe` the losses among a whole batch's metrics of this rank. A collective."""
        order = sorted(self.weights)
        nothing = (torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
        pairs = [torch.stack(metrics.get(f"{PREFIX}/{name}/loss", nothing)).to(device) for name in order]
        sums = distributed.all_reduce_sum(torch.stack(pairs)).tolist()
        self.observe({name: total / count for name, (total, count) in zip(order, sums, strict=True) if count > 0})

    def observe(self, losses: Mapping[str, float]) -> None:
        """One step of the ascent. `losses` are means over the whole batch of the domains in it."""
        before = sum(self.weights[name] for name in losses)
        top = max(losses.values(), default=0.0)  # the largest exponent is 0: nothing overflows
        grown = {name: self.weights[name] * math.exp(self.config.step_size * (x - top)) for name, x in losses.items()}
        after = sum(grown.values())
        self.weights |= {name: q * before / after for name, q in grown.items()}
