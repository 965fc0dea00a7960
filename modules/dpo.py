"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and its relatives.

    c = sum_t log pi(y_w,t) - log pi_ref(y_w,t),  j likewise for y_l,  delta = c - j
    L = mean over pairs of f(beta, delta) + sft_weight * -log pi(y_w) / |y_w|

f is one of `alignment.losses.DPO_LOSSES` (sigmoid, hinge, ipo, ipo_sum, robust, sigmoid_norm, modpo); sigmoid with
label_smoothing is cDPO. `ld_alpha` weighs tokens beyond the length both completions share (LD-DPO, arXiv 2409.06411),
in policy and reference alike. The second term is that of Pang et al. 2024 (arXiv 2404.19733): a mean over pairs, so it
mixes correctly whatever the micro-batches are. Prompts never enter; the end of text does.

With loss modpo (MODPO, arXiv 2310.03708) other objectives take part by their rewards m, of which the data holds the
differences: delta becomes (delta - sum_k w_k (m_k,w - m_k,l) / beta) / (1 - sum_k w_k).

Deviations: IPO comes in TRL's length-normalised form (`ipo`) and in the paper's (`ipo_sum`).
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.losses import (
    PairLogRatios,
    check_dpo_loss,
    check_margin_columns,
    check_margins,
    length_desensitised,
    margin_of,
    share,
    weighted,
)
from alignment.metrics import Metrics
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.reference import ReferenceKind
from alignment.referenced import ReferencedMixin
from alignment.update import Counts, group_weights

OPTIM = OptimConfig(lr=1e-6, warmup_steps=10)


class DPO(ReferencedMixin, L.LightningModule):
    """Trains a policy on preference pairs. `predict` writes log-probs and rewards of both sides of each pair.

    Metrics: `loss`, `rewards/chosen` (beta c), `rewards/rejected` (beta j), `rewards/margins`, `rewards/accuracies`
    (c > j, strict), `logps/chosen`, `logps/rejected` (summed, nats), `delta` (comparable across beta), `beta`; with
    `sft_weight` also `loss/dpo` and `loss/sft`.

    Args:
        policy: the model to train; it is its own reference before the first step.
        loss: name of the preference loss, or the import path of your own (my_losses.squared_hinge).
        beta: strength of the pull to the reference; callbacks may move it during training.
        label_smoothing: share of labels assumed flipped, below 0.5: cDPO with sigmoid; needed by robust.
        ld_alpha: weight of tokens beyond the shared length, 0 to 1. Null: plain sums.
        sft_weight: weight of the chosen completions' own negative log-likelihood per token.
        margins: for loss modpo, data column -> weight: the reward of the chosen minus that of the rejected completion
            under another objective. The preferences' own objective has the weight that these leave of 1.
        reference: `cached` log-probs, LoRA's `adapter_off` or `frozen_adapter`, a `copy`, or `auto`: the cheapest.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    reads = "preference"
    moving = ("beta",)

    def __init__(
        self,
        policy: PolicyConfig,
        loss: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        ld_alpha: float | None = None,
        sft_weight: float = 0.0,
        margins: dict[str, float] | None = None,
        reference: ReferenceKind = "auto",
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        super().__init__(policy=policy, reference=reference, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()
        self.pair_loss = check_dpo_loss(loss, beta, label_smoothing)
        self.margins = dict(margins or {})
        check_margins(loss, self.margins)
        if ld_alpha is not None and not 0 <= ld_alpha <= 1:
            raise UserError(f"ld_alpha is {ld_alpha}; it must lie between 0 and 1")
        if sft_weight < 0:
            raise UserError(f"sft_weight is {sft_weight}; it must not be negative")
        self.beta, self.label_smoothing, self.ld_alpha = beta, label_smoothing, ld_alpha
        self.sft_weight = sft_weight
        if sft_weight:
            self.loss_terms = {"loss/dpo": 1.0, "loss/sft": sft_weight}

    def prepare_data(self) -> None:
        """Look for margins in the rows while there is no model yet; `predict` needs none."""
        if self.margins and self.trainer.state.fn != TrainerFn.PREDICTING:
            check_margin_columns(self.rows_ahead(), self.margins)

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        logps = self.engine(micro).logps
        assert logps is not None
        pairs = self.log_ratios(micro, logps)
        weights = group_weights(micro)
        per_pair = self.pair_loss(pairs, self.beta, self.label_smoothing)
        total = share(per_pair, weights, counts.prompts)
        metrics = {"loss/dpo" if self.sft_weight else "loss": weighted(per_pair, weights)}
        if self.sft_weight:
            nll = -micro.pair(micro.mean_tokens(logps))[0]
            total = total + self.sft_weight * share(nll, weights, counts.prompts)
            metrics["loss/sft"] = weighted(nll, weights)
        return total, metrics | self._metrics(micro, pairs, logps, weights)

    def log_ratios(self, micro: GroupBatch, logps: Tensor) -> PairLogRatios:
        """Policy against reference, from the policy's token log-probs [C]."""
        ratios = logps - self.reference_logps(micro)
        if self.ld_alpha is not None:
            ratios = ratios * length_desensitised(micro, self.ld_alpha)
        chosen, rejected = micro.pair(micro.sum_tokens(ratios))
        chosen_tokens, rejected_tokens = micro.pair(micro.scored_lengths().clamp(min=1))
        return PairLogRatios(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            margin=margin_of(micro, self.margins) if self.margins else None,
            share=1 - sum(self.margins.values()),
        )

    def _metrics(self, micro: GroupBatch, pairs: PairLogRatios, logps: Tensor, weights: Tensor) -> Metrics:
        chosen_logps, rejected_logps = micro.pair(micro.sum_tokens(logps))
        return {
            "rewards/chosen": weighted(self.beta * pairs.chosen, weights),
            "rewards/rejected": weighted(self.beta * pairs.rejected, weights),
            "rewards/margins": weighted(self.beta * pairs.delta, weights),
            "rewards/accuracies": weighted((pairs.chosen > pairs.rejected).double(), weights),
            "logps/chosen": weighted(chosen_logps, weights),
            "logps/rejected": weighted(rejected_logps, weights),
            "delta": weighted(pairs.delta, weights),
            "beta": weighted(torch.full_like(weights, self.beta), weights),
        }

    def predict_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:
        logps = self.engine(batch).logps
        assert logps is not None
        ratios = batch.sum_tokens(logps - self.reference_logps(batch))
        return self.pair_rows(batch, logps=batch.sum_tokens(logps), reward=self.beta * ratios)
