"""Online DPO (Guo et al. 2024, "Direct language model alignment from online AI feedback", arXiv 2402.04792).

    y_1 ... y_G ~ pi,    y_w = argmax_i s_i,  y_l = argmin_i s_i          s: weighted sum of a completion's rewards
    L = mean over pairs of f(beta, c, j)                                  the loss of modules.DPO, any of them

The policy's own completions become preference pairs, by rewards (a reward model is one) in place of the paper's
annotator. A prompt gives one pair, or none where its completions are all scored alike; a reward that abstains is left
out of the sum, a completion without any is in no pair.

Deviations: ties are left out, where TRL takes the first completion for the better one; with more than two completions
per prompt the best and the worst are taken; log-probs are those of the policy as it samples, at `sampling.temperature`.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, REF_LOGPS, TRUNCATED
from alignment.logprobs import TokenStats
from alignment.metrics import Metrics, mean_of
from alignment.online import OnlineMixin
from alignment.optim import OptimConfig
from alignment.pair_losses import PairLogRatios
from alignment.pair_objective import PairObjective
from alignment.paired import PairedMixin, pairs_of
from alignment.penalties import KLConfig
from alignment.policy import PolicyConfig
from alignment.policy_losses import reduce_tokens
from alignment.rewards import RewardSpec
from alignment.rollout import SamplingConfig
from alignment.sampled_pairs import best_and_worst, take_pairs
from alignment.update import Counts

SAMPLING = SamplingConfig(temperature=0.9)
OPTIM = OptimConfig(lr=5e-7, warmup_steps=150)
HOLDS = "what holds OnlineDPO to its reference is beta"


class OnlineDPO(PairedMixin, OnlineMixin, L.LightningModule):
    """Trains a policy on pairs of its own completions. `predict` writes completions with their rewards.

    Metrics: those of GRPO but the ones of its ratio, and of DPO: `rewards/chosen`, `rewards/rejected`,
    `rewards/margins`, `rewards/accuracies`, `logps/chosen`, `logps/rejected`, `delta`, `beta`; `pairs/found`, the share
    of prompts that gave a pair, and `pairs/gap`, how much better the chosen one scored. `adv/...` are of the pairs: 1
    for a chosen completion, -1 for a rejected one.

    Args:
        policy: the model to train; it is its own reference before the first step.
        rewards: name -> reward; see docs/rewards.md.
        loss: name of the preference loss, the import path of your own (my_losses.squared_hinge), or a mix of several,
            loss -> weight ({sigmoid: 0.8, sft: 1.0}); see docs/preferences.md.
        loss_args: settings of the losses that have any.
        beta: strength of the pull to the reference; callbacks may move it during training. Null: that of the loss's
            paper, as in modules.DPO; it is 0.1 of sigmoid.
        label_smoothing: share of labels assumed flipped, below 0.5: cDPO with sigmoid. Null: that of the loss's paper.
        completions: sampled per prompt, at least 2; the best and the worst become the pair.
        sampling: how they are drawn.
        mask_truncated: take no completion into a pair that the length limit ended.
        optim: optimizer and schedule.
        settings: see alignment.online.OnlineMixin.
    """

    reads = "prompts"
    fixed = ("kl",)

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        loss: str | dict[str, float] = "sigmoid",
        loss_args: dict[str, Any] | None = None,
        beta: float | None = None,
        label_smoothing: float | None = None,
        completions: int = 2,
        sampling: SamplingConfig = SAMPLING,
        mask_truncated: bool = False,
        optim: OptimConfig = OPTIM,
        **settings: Any,
    ) -> None:
        if "kl" in settings:
            raise UserError(f"kl cannot be set: {HOLDS}")
        super().__init__(
            policy=policy,
            rewards=rewards,
            completions=completions,
            sampling=sampling,
            mask_truncated=mask_truncated,
            kl=KLConfig(measure=True),
            optim=optim,
            **settings,
        )
        self.save_hyperparameters(ignore=self.fixed)
        self.kl.strength.blocked = HOLDS
        if "modpo" in ([loss] if isinstance(loss, str) else loss):
            raise UserError("preference loss 'modpo' reads margins of a data set; here give rewards with weights")
        self.pair_loss = PairObjective(loss, loss_args, beta=beta, label_smoothing=label_smoothing)
        if completions == 1:
            raise UserError("completions is 1, and a pair is made of two: set completions to 2 or more")
        if self.entropy.config.keep is not None:
            raise UserError("entropy.keep selects tokens, and OnlineDPO learns from whole completions; leave it out")
        self.beta, self.label_smoothing = self.pair_loss.beta, self.pair_loss.label_smoothing

    @property
    def measures_policy(self) -> bool:
        """Not for later updates of a rollout: no ratio to the policy that sampled is in the loss."""
        return not self.samples_itself or self._needs_entropies

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        eligible = batch.scored_lengths() > 0
        if self.mask_truncated:
            eligible &= ~batch.rows[TRUNCATED].bool()
        signal = best_and_worst(table, eligible)
        chosen, rejected = signal > 0, signal < 0
        found = torch.zeros(batch.num_prompts, device=batch.device)
        found[batch.group_of[chosen]] = 1.0
        gap = table.scores[chosen] - table.scores[rejected]
        self._train_window.update({"pairs/found": mean_of(found), "pairs/gap": mean_of(gap)})
        return batch.with_rows(**{ADVANTAGE: signal})

    def update_part(self, part: GroupBatch) -> None:
        self.update(self.whole_batch(take_pairs(part)), self.loss)

    def read(self, micro: GroupBatch, **asked: Any) -> TokenStats:
        return self.engine(micro, temperature=self.temperature, **asked)

    def log_ratios(self, micro: GroupBatch, logps: Tensor) -> PairLogRatios:
        reference = micro.tokens[REF_LOGPS]
        chosen, rejected = micro.pair(micro.sum_tokens(reference))
        nll = -micro.pair(micro.sum_tokens(logps))[0]
        return pairs_of(micro, logps - reference, reference_delta=chosen - rejected, chosen_nll=nll)

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        stats = self.read(micro, entropy=True)
        parts, metrics = self.preference(micro, stats, counts)
        penalty, more = self.penalties(micro, stats, counts)
        metrics |= {"loss/policy_avg": metrics.pop("loss"), **more}
        return parts["dpo"] + penalty, metrics

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        return reduce_tokens(values, micro, counts)
