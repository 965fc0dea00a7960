"""Decoupled policy optimisation: one policy head per reward on a shared trunk, fused by attention.

    u_k = h + r^(-1/2) U_k gelu(D_k h)    s_k = (Q_k h).(C_k u_k) / sqrt(width)    alpha = softmax(s / tau + log w)
    log pi = log_softmax(W sum_k alpha_k u_k)                      the log-linear pool of the heads' own policies pi_k
    A_k = (r_k - mean_g r_k) / (std_g r_k + eps)    S = sum_k w_k A_k    A = (S - mean S) / std S    as in modules.GDPO

part              learns from                     held back by
head k            A_k / std S: its own reward;    beta KL(pi || ref) + beta_h KL(pi_k || ref)
                  A_k / std A_k where less, for
                  opposed rewards cancel in S
fusion            A                               beta KL(pi || ref) - c H(alpha)
trunk, LM head    A; with isolation a sum over    beta KL(pi || ref)
                  k of w_k A_k / std S, of which
                  conflicts may be cut

through a clipped policy loss whose ratio is that of the fused policy, from which completions are drawn. Heads step on
their mean gradient over three steps of the trunk. Weights enter S and the fusion, never a head, so at decoding they are
a dial: it trades rewards against each other without training (`fusion.weights`, callbacks.PreferenceDial).

The method comes from a description of "Generalized Decoupled Policy Optimization" without a paper; NVIDIA's GDPO is
another one. As described it is unstable: nothing bounds the heads, and projecting conflicts away deadlocks rewards that
are opposed. Here heads have a KL of their own and rewards are not isolated unless asked for; `preset: brief` is the
described form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from alignment.advantages import ADVANTAGES, RewardTable, estimate
from alignment.batches import GroupBatch
from alignment.experience import ADVANTAGE, BEFORE, unscored
from alignment.head_config import BudgetConfig, ColdStartConfig, FusionConfig, HeadsConfig, preset_values, with_preset
from alignment.headed import Seen
from alignment.isolated import IsolatedMixin
from alignment.isolation import IsolationConfig
from alignment.metrics import Metrics
from alignment.objective import PolicyObjective
from alignment.penalties import KLConfig
from alignment.policy import PolicyConfig
from alignment.policy_losses import Reduction
from alignment.rewards import RewardSpec
from alignment.settings import as_config
from alignment.update import Counts

KL = KLConfig(coefficient=0.02)
HEADS, FUSION, ISOLATION, COLD_START = HeadsConfig(), FusionConfig(), IsolationConfig(), ColdStartConfig()


class DecoupledPO(IsolatedMixin, L.LightningModule):
    """Trains a policy with one head for each reward. `predict` writes completions with their rewards.

    Metrics: those of GDPO, and `fusion/alpha/NAME`, `fusion/entropy` (nats), `heads/dev/NAME` (distance of a head's
    states from the trunk's, relative), with heads.kl or kl.measure `kl/NAME` (a head's own policy, nats per token),
    `grad_norm/trunk`, `/fusion`, `/head/NAME`; with isolation or isolation.measure_every `grad/cos/NAME/OTHER`,
    `grad_norm/NAME` and `loss/NAME`, with isolation `grad/isolated/NAME`, `grad/ratio/NAME`.

    Args:
        policy: the model to train; it is its own reference before the first step.
        rewards: name -> reward; see docs/rewards.md. A weight is a preference, at least 0; 0 drops the head.
        preset: `amended`, or `brief`, the described form: it replaces settings that are at their default by heads of
            rank 64 without scale and KL, projection of conflicts above 0.25, and a cold start of 3 epochs.
        heads: the sub-policies.
        fusion: how they become one policy.
        isolation: what conflicting rewards may do to the trunk.
        cold_start: training heads one by one first.
        budget: shares of the trained parameters, in place of heads.rank and fusion.width.
        kl_limit: leave out updates at which the policy's mean k3 to the reference is above this many nats per token.
            Null: none.
        eps: added to a reward's deviation within the group and to that of the batch.
        loss: name of the policy loss, or the import path of your own (my_file.my_loss).
        loss_args: its settings, for example {low: 0.2, high: 0.28}.
        reduction: from tokens to the loss; see modules.GRPO. Null: that of the loss's paper.
        kl: divergence of the fused policy from the reference, in the loss.
        settings: see alignment.online.OnlineMixin.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        preset: Literal["amended", "brief"] = "amended",
        heads: HeadsConfig = HEADS,
        fusion: FusionConfig = FUSION,
        isolation: IsolationConfig = ISOLATION,
        cold_start: ColdStartConfig = COLD_START,
        budget: BudgetConfig | None = None,
        kl_limit: float | None = None,
        eps: float = 1e-4,
        loss: str = "clip",
        loss_args: dict[str, Any] | None = None,
        reduction: Reduction | None = None,
        kl: KLConfig = KL,
        **settings: Any,
    ) -> None:
        form, start = preset_values(preset), as_config(ColdStartConfig, cold_start)
        super().__init__(
            policy=policy,
            rewards=rewards,
            heads=with_preset(HeadsConfig, heads, form.get("heads")),
            fusion=fusion,
            isolation=with_preset(IsolationConfig, isolation, form.get("isolation")),
            cold_start=with_preset(ColdStartConfig, start, None if start.rollouts else form.get("cold_start")),
            budget=budget,
            kl_limit=kl_limit,
            kl=kl,
            **settings,
        )
        self.save_hyperparameters()
        self.advantage = ADVANTAGES.get("gdpo", {"eps": eps})
        self.objective = PolicyObjective(loss, loss_args, reduction, self.sampling.max_tokens)

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        weights = torch.tensor(self.heads.preference) * len(self.suite.names)
        found = estimate(self.advantage, replace(table, weights=weights.to(table.weights)))
        self.warn_once(found.warning)
        assert found.parts is not None, "gdpo says what it is made of"
        own = self.own_advantages(found.parts)
        rows = {ADVANTAGE: found.values, BEFORE: found.parts.summed}
        rows |= {f"{ADVANTAGE}/{name}": own[:, k] for k, name in enumerate(self.suite.names)}
        return unscored(batch.with_rows(**rows), ~found.valid)

    def rest(self, micro: GroupBatch, seen: Seen, counts: Counts) -> tuple[Tensor, Metrics]:
        """The fusion learns from the combined advantage, each head from its own reward's."""
        total, metrics = self.held_back(micro, seen, counts)
        columns = [ADVANTAGE, *(f"{ADVANTAGE}/{self.suite.names[k]}" for k in self.heads.active)]
        first = 0 if self.solo is None else 1
        losses = [self.surrogate(micro, seen.logps[1 + i], columns[i], counts) for i in range(first, len(columns))]
        for loss, clips in losses:
            total, metrics = total + loss, clips | metrics
        self.note_clips([clips for _, clips in losses[1 - first :]])
        return total, metrics

    def combined_loss(self, micro: GroupBatch, logps: Tensor, counts: Counts) -> Tensor:
        return self.surrogate(micro, logps, ADVANTAGE, counts)[0]

    def reward_losses(self, micro: GroupBatch, logps: Tensor, counts: Counts) -> dict[str, Tensor]:
        return {n: self.surrogate(micro, logps, f"{ADVANTAGE}/{n}", counts)[0] for n in self.isolation.names}

    def surrogate(self, micro: GroupBatch, logps: Tensor, column: str, counts: Counts) -> tuple[Tensor, Metrics]:
        return self.objective(micro, logps, micro.rows[column][micro.row_of()], counts)

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        return self.objective.reduce(values, micro, counts)
