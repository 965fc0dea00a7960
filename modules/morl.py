"""Multi-objective reinforcement learning: several rewards as one score, or their gradients as one gradient.

    of rewards    s = f(r_1 ... r_K; w)                      then GRPO or PPO with s        (`alignment.scalarise`)
    of gradients  L_k: GRPO's or PPO's loss with reward k    g = sum_k a_k g_k + g_rest     (`alignment.combine`)

weighted_sum is what is called MORLHF and the same as GRPO or PPO with weighted rewards. chebyshev and smooth_chebyshev
score a completion by the reward that lacks most. mgda (Sener and Koltun 2018, arXiv 1810.04650), pcgrad (2001.06782),
cagrad (2110.14048), nash (2202.01017), gradvac (2010.05874) and gradient_sum look at the gradients of all rewards over
the whole batch, K + 1 backward passes. KL, entropy bonus and value loss (g_rest) are added after that. Papers combine
gradients of losses that differ in their labels; here they differ in their advantages, all of the same completions.

Without a critic advantages are relative to the group, as in GRPO; with one they come from GAE with values for each
score, as in PPO. With `preferences` every prompt says how much each reward counts for it (`alignment.preferences`).
"""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor

from alignment.actor_critic import ADVANTAGES, place
from alignment.advantages import ADVANTAGES as ESTIMATORS
from alignment.batches import GroupBatch
from alignment.components import REST
from alignment.critic import CriticConfig
from alignment.metrics import Metrics, add_metrics
from alignment.objective import PolicyObjective
from alignment.policy import PolicyConfig
from alignment.policy_losses import Reduction
from alignment.preferences import PreferenceConfig
from alignment.rewards import RewardSpec
from alignment.several import SeveralMixin
from alignment.update import Counts


class MORL(SeveralMixin, L.LightningModule):
    """Trains a policy on several rewards at once. `predict` writes completions with their rewards.

    Metrics: those of GRPO, with a critic those of PPO (means over the scores). When gradients are combined, for each
    reward `loss/NAME`, `grad_norm/NAME`, `grad/weight/NAME` (a_k) and `grad/cos/NAME/OTHER`; `loss` is sum_k a_k L_k.

    Args:
        policy: the model to train; it is its own reference before the first step.
        rewards: name -> reward; see docs/rewards.md. Weights are at least 0; what they mean depends on the method.
        combine: how gradients become one: mgda, pcgrad, cagrad, nash, gradvac, gradient_sum, or the import path of your
            own. Null: mgda, unless rewards become one score.
        scalarise: how rewards become one score: weighted_sum, chebyshev, smooth_chebyshev, or the import path of your
            own. Null: they do not.
        method_args: settings of either, for example {c: 0.4}.
        ideal: name -> the best a reward can be, for chebyshev and smooth_chebyshev. Null: the best seen so far.
        preferences: tell the policy how much each reward counts, another preference at each prompt. Null: do not.
        advantage, advantage_args: of each score within its group, without a critic; see modules.GRPO.
        critic: where values come from; see modules.PPO. Null: advantages are relative to the group.
        value_coefficient, value_clip, gamma, lam, whiten_advantages: with a critic; see modules.PPO.
        loss, loss_args, reduction: of the policy; see modules.GRPO.
        settings: see alignment.online.OnlineMixin.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        combine: str | None = None,
        scalarise: str | None = None,
        method_args: dict[str, Any] | None = None,
        ideal: dict[str, float] | None = None,
        preferences: PreferenceConfig | None = None,
        advantage: str = "group",
        advantage_args: dict[str, Any] | None = None,
        critic: CriticConfig | None = None,
        value_coefficient: float = 0.1,
        value_clip: float | None = 0.2,
        gamma: float = 1.0,
        lam: float = 0.95,
        whiten_advantages: bool = True,
        loss: str = "clip",
        loss_args: dict[str, Any] | None = None,
        reduction: Reduction | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            policy=policy,
            rewards=rewards,
            combine=combine,
            scalarise=scalarise,
            method_args=method_args,
            ideal=ideal,
            preferences=preferences,
            critic=critic,
            value_coefficient=value_coefficient,
            value_clip=value_clip,
            gamma=gamma,
            lam=lam,
            whiten_advantages=whiten_advantages,
            **settings,
        )
        self.save_hyperparameters()
        self.advantage = ESTIMATORS.get(advantage, advantage_args)
        self.objective = PolicyObjective(loss, loss_args, reduction, self.sampling.max_tokens)

    def parts(self, micro: GroupBatch, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
        stats = self.token_stats(micro, states=self.reads_states)
        assert stats.logps is not None
        shares, metrics = {}, Metrics()
        for name in self.scores:
            advantages = micro.tokens[place(ADVANTAGES, name)]
            shares[name], found = self.objective(micro, stats.logps, advantages, counts)
            add_metrics(metrics, found)
        shares[REST], more = self.penalties(micro, stats, counts)
        if self.critic_config is not None:
            value, found = self.value_share(micro, stats, counts)
            shares[REST], more = shares[REST] + value, more | found
        return shares, metrics | more

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        return self.objective.reduce(values, micro, counts)
