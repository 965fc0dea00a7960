"""Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300) and its relatives.

    A_i = (s_i - mean_g s) / (std_g s + eps)              s: weighted sum of the rewards of completion i of group g
    L   = sum over tokens of -min(r A, clip(r, 1 - e, 1 + e) A) / tokens of the batch + beta KL(pi || pi_ref)

The advantage is one of `alignment.advantages` (group, none: Dr.GRPO, batch: Lite-PPO, rloo, reinforce_pp, gdpo: see
modules.GDPO), the loss one of `alignment.policy_losses` (clip, clip_higher: DAPO, dual_clip, delta, gspo, cispo, sapo),
either also a function of your own by import path. The defaults differ from the paper in two ways: a token mean over the
whole update instead of a mean of per-completion means, and beta 0, under which completions without an advantage are
skipped, with the same gradient. `configs/presets/grpo_paper.yaml` is the paper's form; beside it are those of the
papers named above.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
from torch import Tensor

from alignment.advantages import ADVANTAGES, RewardTable, estimate
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, BEFORE, unscored, without_signal
from alignment.metrics import Metrics
from alignment.objective import PolicyObjective
from alignment.online import OnlineMixin
from alignment.policy import PolicyConfig
from alignment.policy_losses import Reduction
from alignment.rewards import RewardSpec
from alignment.update import Counts


class GRPO(OnlineMixin, L.LightningModule):
    """Trains a policy on groups of its own completions. `predict` writes completions with their rewards.

    Metrics: `reward` (weighted sum), `reward_std` (within groups), `rewards/NAME/mean` and `std`, `strata/LABEL/...`,
    `frac_reward_zero_std`, `adv/...` (alignment.reward_metrics); `completions/...` (alignment.experience);
    `frac_masked_seq` (share of completions that are not trained on); `clip_ratio/...`, `ratio`, `policy/...`
    (alignment.policy_losses); `entropy`, `kl`, `objective/kl` (nats per completion), `loss`, `loss/policy_avg`,
    `grad_norm`. Those of an update are over the completions it trained on.

    Args:
        policy: the model to train; it is its own reference before the first step.
        rewards: name -> reward; see docs/rewards.md.
        advantage: name of the estimator, or the import path of your own (my_file.my_advantage).
        advantage_args: its settings, for example {eps: 1.0e-6}.
        loss: name of the policy loss, or the import path of your own (my_file.my_loss).
        loss_args: its settings, for example {low: 0.2, high: 0.28}.
        reduction: from tokens to the loss: token_mean, seq_mean_token_mean, seq_mean_token_sum, const. Null: that of
            the loss's paper, token_mean for clip.
        settings: see alignment.online.OnlineMixin.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        advantage: str = "group",
        advantage_args: dict[str, Any] | None = None,
        loss: str = "clip",
        loss_args: dict[str, Any] | None = None,
        reduction: Reduction | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policy=policy, rewards=rewards, **settings)
        self.save_hyperparameters()
        self.advantage = ADVANTAGES.get(advantage, advantage_args)
        if self.completions == 1 and advantage in ADVANTAGES:
            raise UserError(
                f"completions is 1, and the advantage '{advantage}' compares the completions of a prompt: set "
                "completions to 2 or more, or use modules.PPO"
            )
        self.objective = PolicyObjective(loss, loss_args, reduction, self.sampling.max_tokens)
        self.skips = self.objective.proportional and not self.penalises

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        if self.kl.in_reward:
            table = replace(table, penalty=self.kl.coefficient * self.completion_kl(batch))
        found = estimate(self.advantage, table)
        self.warn_once(found.warning)
        rows = {ADVANTAGE: found.values} | ({} if found.parts is None else {BEFORE: found.parts.summed})
        return unscored(batch.with_rows(**rows), ~found.valid)

    def update_part(self, part: GroupBatch) -> None:
        counts = Counts.of(part)
        skips = self.skips and not self.penalises  # which a callback may have begun to do
        self.update(without_signal(part) if skips else part, self.loss, keep_groups=False, counts=counts)

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        stats = self.token_stats(micro)
        assert stats.logps is not None
        total, metrics = self.objective(micro, stats.logps, micro.rows[ADVANTAGE][micro.row_of()], counts)
        penalty, more = self.penalties(micro, stats, counts)
        return total + penalty, metrics | more

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        return self.objective.reduce(values, micro, counts)
