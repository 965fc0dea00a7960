"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) of a language model, as in Ouyang et al. 2022
(arXiv 2203.02155).

    r_t = -beta kl_t, plus the score at a completion's last token      A, R = GAE(r, V; gamma, lambda)
    L   = mean over tokens of -min(ratio A', clip(ratio) A') + c_v/2 max((V - R)^2, (clip(V) - R)^2)

A' is A whitened over all tokens of the batch. V is a head on the policy's trunk, a model of its own, or one started
from a reward model (`alignment.critic`). The score is the weighted sum of the rewards, on the last token that was
sampled, the end of text included; one token later, as in TRL, would change A by a factor lambda. Tokens that are not
scored do not exist for GAE. Deviations: minibatches are consecutive prompts, not a new shuffle for each epoch, so that
a run does not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment import memory
from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.critic import Critic, CriticConfig
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, TRUNCATED, return_metrics, unscored
from alignment.gae import gae, token_rewards, whiten
from alignment.logprobs import TokenStats, evaluating
from alignment.metrics import Metrics, mean_of
from alignment.objective import PolicyObjective
from alignment.online import OnlineMixin
from alignment.penalties import KLConfig
from alignment.policy import PolicyConfig
from alignment.policy_losses import value_loss, value_metrics
from alignment.rewards import RewardSpec
from alignment.training import as_config
from alignment.update import Counts

CRITIC = CriticConfig()
KL = KLConfig(coefficient=0.05, estimator="k1", place="reward")
VALUES, RETURNS, ADVANTAGES = "values", "returns", "advantages"


class PPO(OnlineMixin, L.LightningModule):
    """Trains a policy and a critic on the policy's completions. `predict` writes completions with their rewards.

    Metrics: those of GRPO, and `explained_variance`, `value_mean`, `val/clipfrac_avg`, `loss/value_avg`,
    `objective/scores`, `objective/non_score_reward`, `objective/rlhf_reward` (TRL's names).

    Args:
        policy: the model to train; it is its own reference before the first step.
        rewards: name -> reward; see docs/rewards.md.
        completions: sampled per prompt.
        critic: where values come from.
        value_coefficient: c_v, the weight of the value loss.
        value_clip: how far a value may move from the one at the rollout. Null: any distance.
        gamma: discount per token.
        lam: lambda of GAE.
        whiten_advantages: subtract their mean over the batch's tokens and divide by their deviation.
        missing_eos_penalty: subtracted from the score of a completion that the length limit ended.
        loss: name of the policy loss, or the import path of your own (my_file.my_loss).
        loss_args: its settings, for example {low: 0.2, high: 0.28}.
        epochs: passes over each rollout.
        kl: divergence from the reference; with `target` the coefficient follows it.
        settings: see alignment.online.OnlineMixin.
    """

    critic: Critic

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        completions: int = 1,
        critic: CriticConfig = CRITIC,
        value_coefficient: float = 0.1,
        value_clip: float | None = 0.2,
        gamma: float = 1.0,
        lam: float = 0.95,
        whiten_advantages: bool = True,
        missing_eos_penalty: float = 0.0,
        loss: str = "clip",
        loss_args: dict[str, Any] | None = None,
        epochs: int = 4,
        kl: KLConfig = KL,
        **settings: Any,
    ) -> None:
        super().__init__(policy=policy, rewards=rewards, completions=completions, epochs=epochs, kl=kl, **settings)
        self.save_hyperparameters()
        if not (0 <= gamma <= 1 and 0 <= lam <= 1):
            raise UserError(f"gamma is {gamma} and lam {lam}; both lie between 0 and 1")
        if value_coefficient < 0 or missing_eos_penalty < 0 or (value_clip is not None and value_clip <= 0):
            raise UserError("value_coefficient and missing_eos_penalty are at least 0, value_clip above 0 or null")
        self.critic_config = as_config(CriticConfig, critic)
        self.value_coefficient, self.value_clip = value_coefficient, value_clip
        self.gamma, self.lam, self.whiten_advantages = gamma, lam, whiten_advantages
        self.missing_eos_penalty = missing_eos_penalty
        self.objective = PolicyObjective(loss, loss_args, None, self.sampling.max_tokens)

    def build_parts(self) -> None:
        super().build_parts()
        self.critic = Critic(self, self.critic_config)

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        return replace(super().memory_plan(trainer), critic=self.critic_config)

    @property
    def measures_policy(self) -> bool:
        """Always: the values of the rollout are needed, and a shared trunk gives log-probs with them."""
        return True

    def measure_policy(self, micro: GroupBatch) -> dict[str, Tensor]:
        stats = self.token_stats(micro, states=self.critic.shares_trunk)
        with evaluating(self.critic):
            return {**self.old_stats(stats), VALUES: self._values(micro, stats)}

    def _values(self, micro: GroupBatch, stats: TokenStats) -> Tensor:
        # A full-vocabulary KL asks for states too, which a critic with a trunk of its own does not read.
        values: Tensor = self.critic(micro, stats.hidden if self.critic.shares_trunk else None)
        return values

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        scores = table.scores.float() - self.missing_eos_penalty * batch.rows[TRUNCATED]
        batch = unscored(batch, scores.isnan())
        penalty = self.kl.coefficient * self.rollout_kl(batch) if self.kl.in_reward else None
        rewards = token_rewards(batch, scores, penalty)
        values = batch.tokens.get(VALUES, torch.zeros_like(rewards))
        advantages, returns = gae(batch, rewards, values, gamma=self.gamma, lam=self.lam)
        self._train_window.update(return_metrics(batch, scores, rewards, values, returns))
        if self.whiten_advantages:
            advantages = whiten(advantages, batch.scored)
        batch = batch.with_tokens(**{ADVANTAGES: advantages, RETURNS: returns, VALUES: values})
        return batch.with_rows(**{ADVANTAGE: batch.mean_tokens(advantages)})

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        stats = self.token_stats(micro, states=self.critic.shares_trunk)
        assert stats.logps is not None
        policy, metrics = self.objective(micro, stats.logps, micro.tokens[ADVANTAGES], counts)
        penalty, more = self.penalties(micro, stats, counts)
        values = self._values(micro, stats)
        old, returns = micro.tokens[VALUES], micro.tokens[RETURNS]
        errors = value_loss(values, old, returns, clip=self.value_clip)
        value = self.reduce(errors, micro, counts)
        metrics |= value_metrics(values, old, returns, micro.scored, self.value_clip)
        metrics["loss/value_avg"] = mean_of(errors, micro.scored)
        return policy + penalty + self.value_coefficient * value, metrics | more

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        return self.objective.reduce(values, micro, counts)
