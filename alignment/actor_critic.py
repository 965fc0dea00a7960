"""ActorCriticMixin: online modules with a critic, of one score or of several at once.

    A, R = GAE(r, V; gamma, lambda)     L_V = 1/2 max((V - R)^2, (clip(V) - R)^2)

Each score has values, advantages and returns of its own: token tensors `values`, `advantages`, `returns`, with `/NAME`
behind them where the score has a name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment import memory
from alignment.batches import GroupBatch
from alignment.causal_lm import evaluating
from alignment.critic import Critic, CriticConfig
from alignment.errors import UserError
from alignment.experience import return_metrics, unscored
from alignment.gae import gae, token_rewards, whiten
from alignment.logprobs import TokenStats
from alignment.metrics import Metrics, add_metrics, mean_of
from alignment.online import OnlineMixin
from alignment.policy_losses import value_loss, value_metrics
from alignment.settings import as_config
from alignment.update import Counts

VALUES, RETURNS, ADVANTAGES = "values", "returns", "advantages"


def place(kind: str, name: str) -> str:
    """Name of the token tensor that holds this of a score; "" is the score without a name."""
    return f"{kind}/{name}" if name else kind


class ActorCriticMixin(OnlineMixin):
    """OnlineMixin with a critic, if there is one.

    Args:
        critic: where values come from; None: there are none.
        value_coefficient, value_clip, gamma, lam, whiten_advantages: see modules.PPO.
    """

    critic: Critic
    scores: tuple[str, ...] = ("",)
    """What values are of."""

    def __init__(
        self,
        *,
        critic: CriticConfig | None,
        value_coefficient: float,
        value_clip: float | None,
        gamma: float,
        lam: float,
        whiten_advantages: bool,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if not (0 <= gamma <= 1 and 0 <= lam <= 1):
            raise UserError(f"gamma is {gamma} and lam {lam}; both lie between 0 and 1")
        if not 0 <= value_coefficient < math.inf or not (value_clip is None or value_clip > 0):
            raise UserError(
                f"value_coefficient is {value_coefficient} and value_clip {value_clip}; the first is at least 0 and "
                "finite, the second above 0, or null"
            )
        self.critic_config = None if critic is None else as_config(CriticConfig, critic)
        self.value_coefficient, self.value_clip = value_coefficient, value_clip
        self.gamma, self.lam, self.whiten_advantages = gamma, lam, whiten_advantages

    def build_parts(self) -> None:
        super().build_parts()
        if self.critic_config is not None:
            self.critic = Critic(self, self.critic_config, outputs=len(self.scores))

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        return replace(super().memory_plan(trainer), critic=self.critic_config)

    # ------------------------------------------------------------------ values

    @property
    def reads_states(self) -> bool:
        """Whether the critic reads the policy's own states."""
        return self.critic_config is not None and self.critic.shares_trunk

    @property
    def measures_policy(self) -> bool:
        """With a critic always: the values of the rollout are needed, and a shared trunk gives log-probs with them."""
        return self.critic_config is not None or super().measures_policy

    def measure_policy(self, micro: GroupBatch) -> dict[str, Tensor]:
        if self.critic_config is None:
            return super().measure_policy(micro)
        stats = self.token_stats(micro, states=self.reads_states)
        with evaluating(self.critic):
            values = zip(self.scores, self._values(micro, stats), strict=True)
            return {**self.old_stats(stats), **{place(VALUES, name): value for name, value in values}}

    def _values(self, micro: GroupBatch, stats: TokenStats) -> tuple[Tensor, ...]:
        """[C] for each score."""
        # A full-vocabulary KL asks for states too, which a critic with a trunk of its own does not read.
        values: Tensor = self.critic(micro, stats.hidden if self.critic.shares_trunk else None)
        return (values,) if values.ndim == 1 else values.unbind(1)

    # ------------------------------------------------------------------ advantages and loss

    def credit_tokens(
        self, batch: GroupBatch, scores: Tensor, name: str = "", penalty: Tensor | None = None
    ) -> GroupBatch:
        """With advantages and returns of one score. A collective: give it the whole batch.

        Args:
            scores: [N]; where one is NaN the completion has no advantage from it and teaches its values nothing.
            penalty: [C] subtracted at every token.
        """
        mine = unscored(batch, scores.isnan())
        rewards = token_rewards(mine, scores, penalty)
        values = batch.tokens.get(place(VALUES, name), torch.zeros_like(rewards))
        advantages, returns = gae(mine, rewards, values, gamma=self.gamma, lam=self.lam)
        self._train_window.update(return_metrics(mine, scores, rewards, values, returns, self.old_logps(mine)))
        if self.whiten_advantages:
            advantages = whiten(advantages, mine.scored)
        returns = torch.where(batch.scored & ~mine.scored, torch.nan, returns)
        found = {ADVANTAGES: advantages, RETURNS: returns, VALUES: values}
        return batch.with_tokens(**{place(kind, name): values for kind, values in found.items()})

    def value_share(self, micro: GroupBatch, stats: TokenStats, counts: Counts) -> tuple[Tensor, Metrics]:
        """(this micro-batch's share of the value losses of all scores, times their coefficient; metrics, which are
        means over the scores)."""
        total, metrics = torch.zeros((), device=micro.device), Metrics()
        for name, values in zip(self.scores, self._values(micro, stats), strict=True):
            old, returns = micro.tokens[place(VALUES, name)], micro.tokens[place(RETURNS, name)]
            known = micro.scored & ~returns.isnan()
            returns = torch.where(known, returns, 0.0)
            errors = torch.where(known, value_loss(values, old, returns, clip=self.value_clip), 0.0)
            total = total + self.value_coefficient * self.reduce(errors, micro, counts)
            add_metrics(metrics, value_metrics(values, old, returns, known, self.value_clip))
            add_metrics(metrics, {"loss/value_avg": mean_of(errors, known)})
        return total, metrics
