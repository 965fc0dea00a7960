"""Reward model.

    L = mean over pairs of -log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2

r is a linear head on the state at the last real completion token, so a score depends on neither padding nor batch.
Pairwise loss: Bradley and Terry (1952), Ouyang et al. 2022 (arXiv 2203.02155); margin m: Touvron et al. 2023 (arXiv
2307.09288); centring c: Eisenstein et al. 2023 (arXiv 2312.09244); ensembles: Coste et al. 2023 (arXiv 2310.02743).
Each member of an ensemble is trained on the loss of its own scores (the mean over members is minimised); metrics and
`predict` use the aggregated score. Deviation from Coste et al.: members see the same pairs in the same order.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.ensemble import EnsembleKind, RewardHeads, check_ensemble
from alignment.errors import UserError
from alignment.losses import Aggregation, aggregate, bradley_terry, centring, share, weighted
from alignment.metrics import Metrics
from alignment.module import PolicyMixin
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.update import Counts, group_weights

OPTIM = OptimConfig(lr=1e-5)
MARGIN = "margin"


class RewardModel(PolicyMixin, L.LightningModule):
    """Trains a scalar reward from preference pairs. `predict` writes the scores of both sides of each pair.

    Metrics: `loss`, `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies` (strict: ties count
    0), and with several members `rewards/std` (population, over members).

    Args:
        policy: the model whose trunk is trained.
        members: number of scores per completion.
        ensemble: what members do not share: `heads` nothing but the head, `adapters` a LoRA adapter each (needs
            policy.lora), `copies` a whole model each.
        aggregation: one score from several: `mean`, `min`, or `uwo` (mean minus penalty times variance).
        uncertainty_penalty: the penalty of `uwo`.
        use_margin: subtract the data's column `margin` from the score difference, where the data has one.
        centre_coefficient: c above; 0.01 is a usual value.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    reads = "preference"
    heads: RewardHeads

    def __init__(
        self,
        policy: PolicyConfig,
        members: int = 1,
        ensemble: EnsembleKind = "heads",
        aggregation: Aggregation = "mean",
        uncertainty_penalty: float = 0.5,
        use_margin: bool = True,
        centre_coefficient: float = 0.0,
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        super().__init__(policy=policy, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()
        check_ensemble(self, members, ensemble)
        if centre_coefficient < 0:
            raise UserError(f"centre_coefficient is {centre_coefficient}; it must not be negative")
        self.members, self.ensemble = members, ensemble
        self.aggregation, self.uncertainty_penalty = aggregation, uncertainty_penalty
        self.use_margin, self.centre_coefficient = use_margin, centre_coefficient

    def build_parts(self) -> None:
        self.heads = RewardHeads(self, self.members, self.ensemble)

    def rewards(self, batch: GroupBatch) -> Tensor:
        """[N] aggregated score of each completion."""
        return aggregate(self.heads(batch), self.aggregation, self.uncertainty_penalty)

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        scores = self.heads(micro)
        chosen, rejected = micro.pair(scores)  # [P, E] each
        margin = micro.pair(micro.rows[MARGIN])[0][:, None] if self.use_margin and MARGIN in micro.rows else None
        loss = bradley_terry(chosen, rejected, margin)
        if self.centre_coefficient:
            loss = loss + self.centre_coefficient * centring(chosen, rejected)
        weights = group_weights(micro)
        per_pair = loss.mean(dim=1)
        return share(per_pair, weights, counts.prompts), {
            "loss": weighted(per_pair, weights),
            **self._metrics(micro, scores.detach(), weights),
        }

    def _metrics(self, micro: GroupBatch, scores: Tensor, weights: Tensor) -> Metrics:
        chosen, rejected = micro.pair(aggregate(scores, self.aggregation, self.uncertainty_penalty))
        metrics: Metrics = {
            "rewards/chosen": weighted(chosen, weights),
            "rewards/rejected": weighted(rejected, weights),
            "rewards/margins": weighted(chosen - rejected, weights),
            "rewards/accuracies": weighted((chosen > rejected).double(), weights),
        }
        if self.members > 1:
            metrics["rewards/std"] = weighted(torch.cat(micro.pair(scores.std(dim=1, correction=0))), weights.repeat(2))
        return metrics

    def predict_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:
        return self.pair_rows(batch, reward=self.rewards(batch))
