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

import math
from typing import Any

import lightning as L
from torch import Tensor

from alignment.actor_critic import ADVANTAGES, RETURNS, VALUES, ActorCriticMixin
from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.critic import CriticConfig
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, TRUNCATED, unscored
from alignment.metrics import Metrics
from alignment.objective import PolicyObjective
from alignment.penalties import KLConfig
from alignment.policy import PolicyConfig
from alignment.rewards import RewardSpec
from alignment.update import Counts

__all__ = ["ADVANTAGES", "PPO", "RETURNS", "VALUES"]

CRITIC = CriticConfig()
KL = KLConfig(coefficient=0.05, estimator="k1", place="reward")


class PPO(ActorCriticMixin, L.LightningModule):
    """Trains a policy and a critic on the policy's completions. `predict` writes completions with their rewards.

    Metrics: those of GRPO, and `explained_variance`, `value_mean`, `val/clipfrac_avg`, `loss/value_avg`,
    `objective/scores`, `objective/non_score_reward`, `objective/rlhf_reward`, `objective/entropy` (TRL's names).

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
        super().__init__(
            policy=policy,
            rewards=rewards,
            completions=completions,
            critic=critic,
            value_coefficient=value_coefficient,
            value_clip=value_clip,
            gamma=gamma,
            lam=lam,
            whiten_advantages=whiten_advantages,
            epochs=epochs,
            kl=kl,
            **settings,
        )
        self.save_hyperparameters()
        if not 0 <= missing_eos_penalty < math.inf:
            raise UserError(f"missing_eos_penalty is {missing_eos_penalty}; it must be at least 0, and finite")
        self.missing_eos_penalty = missing_eos_penalty
        self.objective = PolicyObjective(loss, loss_args, None, self.sampling.max_tokens)

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        scores = table.scores.float() - self.missing_eos_penalty * batch.rows[TRUNCATED]
        penalty = self.kl.coefficient * self.rollout_kl(batch) if self.kl.in_reward else None
        batch = self.credit_tokens(unscored(batch, scores.isnan()), scores, penalty=penalty)
        return batch.with_rows(**{ADVANTAGE: batch.mean_tokens(batch.tokens[ADVANTAGES])})

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        stats = self.token_stats(micro, states=self.reads_states)
        assert stats.logps is not None
        policy, metrics = self.objective(micro, stats.logps, micro.tokens[ADVANTAGES], counts)
        penalty, more = self.penalties(micro, stats, counts)
        value, found = self.value_share(micro, stats, counts)
        return policy + penalty + value, metrics | more | found

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        return self.objective.reduce(values, micro, counts)
