"""SeveralMixin: online modules that make several rewards into one score, or their gradients into one gradient.

Rewards, and what a prompt prefers, become the advantages of each score; updates take one loss for each score. Which
scores there are depends on the method: one without a name (`alignment.scalarise`), or one for each reward that has a
weight (`alignment.combine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment import memory
from alignment.actor_critic import ADVANTAGES, ActorCriticMixin, place
from alignment.advantages import Estimator, RewardTable, estimate
from alignment.batches import Group, GroupBatch
from alignment.combine import Combiner
from alignment.components import Objectives, update_objectives
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, unscored, without_signal
from alignment.metrics import Metrics
from alignment.objective import PolicyObjective
from alignment.preferences import PreferenceConfig, Preferences
from alignment.randomness import generator
from alignment.scalarise import Scalariser
from alignment.settings import as_config
from alignment.update import Counts

SIGNAL = "signal"
"""Row tensor: size of all advantages of a completion together; 0 where it has nothing to teach."""


class SeveralMixin(ActorCriticMixin):
    """ActorCriticMixin for several rewards. A subclass sets `advantage` and `objective` and defines `parts`.

    Args:
        combine, scalarise, method_args, ideal, preferences: see modules.MORL.
        settings: see ActorCriticMixin and OnlineMixin.

    Raises UserError for settings that do not go together.
    """

    advantage: Estimator
    objective: PolicyObjective
    keeps_ratio = False

    def __init__(
        self,
        *,
        combine: str | None,
        scalarise: str | None,
        method_args: Mapping[str, Any] | None,
        ideal: Mapping[str, float] | None,
        preferences: PreferenceConfig | None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        names, weights = self.suite.names, self.suite.weights
        if bool((weights < 0).any()) or not bool((weights > 0).any()):
            given = ", ".join(f"{name} {weight:g}" for name, weight in zip(names, weights.tolist(), strict=True))
            raise UserError(f"rewards have weights {given}; each must be at least 0 and one above")
        if combine is not None and scalarise is not None:
            raise UserError(f"combine is {combine} and scalarise {scalarise}; one score has one gradient, so give one")
        self.method: Combiner | Scalariser
        if scalarise is not None:
            self.method = Scalariser(scalarise, method_args, names, ideal)
        else:
            if ideal is not None:
                raise UserError("ideal goes with scalarise: chebyshev or smooth_chebyshev")
            if self.kl.in_reward:
                raise UserError("kl.place is reward, and gradients are combined: set kl.place to loss, or scalarise")
            kept = [name for name, weight in zip(names, weights.tolist(), strict=True) if weight > 0]
            self.method = Combiner(combine or "mgda", method_args, kept)
            self.scores = self.method.names
        config = None if preferences is None else as_config(PreferenceConfig, preferences)
        self.preferences = None if config is None else Preferences(config, names, self.seed)
        self.gradient_factors: dict[str, float] = {}

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        kept = len(self.scores) + 1 if isinstance(self.method, Combiner) else 1
        return replace(super().memory_plan(trainer), gradients=kept)

    def pose(self, prompts: Sequence[Group], step: int | None) -> Sequence[Group]:
        return prompts if self.preferences is None else self.preferences.condition(prompts, step, self.tokenizer)

    # ------------------------------------------------------------------ credit

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        batch = unscored(batch, table.rewards.isnan().all(1))
        total, signal = (torch.zeros(batch.num_completions, device=batch.device) for _ in range(2))
        for name, scores, told in self._columns(batch, table):
            batch = self._credit(batch, table, name, scores)
            key = place(ADVANTAGES, name)
            batch = batch.with_tokens(**{key: batch.tokens[key] * told.float()[batch.row_of()]})
            weight = float(self.suite.weights[self.suite.names.index(name)]) if name else 1.0
            size = weight * batch.mean_tokens(batch.tokens[key])
            total, signal = total + size, signal + size.abs()
        return batch.with_rows(**{ADVANTAGE: total, SIGNAL: signal})

    def _columns(self, batch: GroupBatch, table: RewardTable) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name of a score, the score [N], what its completion's preference multiplies the advantage with [N])."""
        one = torch.ones_like(self.suite.weights).to(batch.device)
        told = torch.ones_like(table.rewards) if self.preferences is None else self.preferences.weights(batch, one)
        if isinstance(self.method, Scalariser):
            yield "", self.method(table.rewards, told * self.suite.weights.to(told)), torch.ones_like(told[:, 0])
            return
        for name in self.scores:
            k = self.suite.names.index(name)
            yield name, table.rewards[:, k], told[:, k]

    def _credit(self, batch: GroupBatch, table: RewardTable, name: str, scores: Tensor) -> GroupBatch:
        """With advantages of one score [N] at every token."""
        if self.critic_config is not None:
            tokens = self.kl.coefficient * self.rollout_kl(batch) if self.kl.in_reward else None
            return self.credit_tokens(batch, scores.float(), name, tokens)
        penalty = self.kl.coefficient * self.completion_kl(batch) if self.kl.in_reward else None
        one = torch.ones(1, device=batch.device)
        found = estimate(self.advantage, replace(table, rewards=scores[:, None], weights=one, penalty=penalty))
        self.warn_once(found.warning)
        return batch.with_tokens(**{place(ADVANTAGES, name): found.values[batch.row_of()]})

    # ------------------------------------------------------------------ updates

    def parts(self, micro: GroupBatch, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
        """(name -> this micro-batch's share of the policy loss with each score, and of REST: all else; metrics)."""
        raise TypeError(f"{type(self).__name__} must define parts(micro, counts)")

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        shares, metrics = self.parts(micro, counts)
        return torch.stack(list(shares.values())).sum(), metrics

    def update_part(self, part: GroupBatch) -> None:
        counts = Counts.of(part)
        if self.skips:
            part = without_signal(part, SIGNAL)
        if isinstance(self.method, Combiner):
            update_objectives(self, part, self.parts, self.scores, self.merge, keep_groups=False, counts=counts)
        else:
            self.update(part, self.loss, keep_groups=False, counts=counts)

    @property
    def skips(self) -> bool:
        """Whether completions without an advantage are left out of updates, which changes nothing."""
        return self.objective.proportional and not self.penalises and self.critic_config is None

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """See `alignment.watching.HasRewardGradients`."""
        return self.method.names if isinstance(self.method, Combiner) else ()

    def merge(self, found: Objectives) -> Tensor:
        """[K] coefficients of the scores' gradients."""
        assert isinstance(self.method, Combiner)
        weights = torch.stack([self.suite.weights[self.suite.names.index(name)] for name in found.names])
        draw = generator(self.seed, "combine", self.batches_seen, self.trainer.global_step)
        scale = torch.tensor([self.gradient_factors.get(name, 1.0) for name in found.names], dtype=torch.float64)
        return self.method(found.gram * torch.outer(scale, scale), weights, draw) * scale

    # ------------------------------------------------------------------ state

    def training_state(self) -> dict[str, Any]:
        return {**super().training_state(), "several": {type(self.method).__name__: self.method.state_dict()}}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        super().load_training_state(state)
        own = type(self.method).__name__
        if own in state["several"]:  # else the run goes on with a method of the other kind
            self.method.load_state_dict(state["several"][own])
