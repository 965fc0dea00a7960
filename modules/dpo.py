"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and its relatives.

    c = sum_t log pi(y_w,t) - log pi_ref(y_w,t),  j likewise for y_l,  delta = c - j
    L = mean over pairs of f(beta, c, j) + sft_weight * -log pi(y_w) / |y_w|

f is one of `alignment.losses.DPO_LOSSES` or a weighted mix of several; docs/preferences.md has a table of them. sigmoid
with label_smoothing is cDPO. `ld_alpha` weighs tokens beyond the length both completions share (LD-DPO, arXiv
2409.06411), in policy and reference alike. `divergence` puts an f-divergence in place of the reverse KL (arXiv
2309.16240). `weighting: wpo` weighs each pair by how likely the policy itself is to write it (arXiv 2406.11827). The
second term is that of Pang et al. 2024 (arXiv 2404.19733): a mean over pairs. Prompts never enter; the end of text
does.

With loss modpo (MODPO, arXiv 2310.03708) other objectives take part by their rewards m, of which the data holds the
differences: delta becomes (delta - sum_k w_k (m_k,w - m_k,l) / beta) / (1 - sum_k w_k).

Deviations: IPO comes in TRL's length-normalised form (`ipo`) and in the paper's (`ipo_sum`). What aot, aot_unpaired,
bco and sft must know of a whole batch is that of all micro-batches and ranks; in validation, of the validation batch.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.divergences import Divergence
from alignment.errors import UserError
from alignment.logprobs import TokenStats
from alignment.losses import check_margin_columns, length_desensitised, margin_of, share, weighted
from alignment.metrics import Metrics
from alignment.optim import OptimConfig
from alignment.pair_losses import PairLogRatios
from alignment.pair_objective import PairObjective
from alignment.paired import PairedMixin, Weighting, check_weighting, pairs_of
from alignment.pairs import pair_gaps
from alignment.policy import PolicyConfig
from alignment.protocols import follows
from alignment.reference import ReferenceKind
from alignment.reference_sync import ReferenceSync
from alignment.referenced import ReferencedMixin
from alignment.update import Counts, group_weights

OPTIM = OptimConfig(lr=1e-6, warmup_steps=10)


class DPO(PairedMixin, ReferencedMixin, L.LightningModule):
    """Trains a policy on preference pairs. `predict` writes log-probs and rewards of both sides of each pair.

    Metrics: `loss`, `rewards/chosen` (beta c), `rewards/rejected` (beta j), `rewards/margins`, `rewards/accuracies`
    (c > j, strict), `logps/chosen`, `logps/rejected` (summed, nats), `delta` (comparable across beta), `beta`,
    `kl/data` (c^2 / 2 and j^2 / 2, nats per completion: k2 on the data, a KL only where the policy wrote them); with
    `sft_weight` also `loss/dpo` and `loss/sft`; of a mix `loss/NAME` of each; with weighting `wpo/weight`.

    Args:
        policy: the model to train; it is its own reference before the first step.
        loss: name of the preference loss, the import path of your own (my_losses.squared_hinge), or a mix of several,
            loss -> weight ({sigmoid: 0.8, bco_pair: 0.2, sft: 1.0}).
        loss_args: settings of the losses that have any, for example {tau: 0.05} of discopop.
        beta: strength of the pull to the reference; callbacks may move it during training. Null: that of the loss's
            paper (0.1 of sigmoid; docs/preferences.md has a table), in a mix of its first loss.
        label_smoothing: share of labels assumed flipped, below 0.5: cDPO with sigmoid. Null: that of the loss's paper
            (0.1 of robust, 0.001 of exo, 0 of others).
        divergence: of the policy from the reference: `reverse_kl`, `forward_kl`, `js` or `alpha`.
        divergence_alpha: which of the alpha-divergences; 1 is reverse_kl.
        weighting: `wpo` weighs pairs by the policy's own probability of them. Null: alike.
        ld_alpha: weight of tokens beyond the shared length, 0 to 1. Null: plain sums.
        sft_weight: weight of the chosen completions' own negative log-likelihood per token.
        margins: for loss modpo, data column -> weight: the reward of the chosen minus that of the rejected completion
            under another objective. The preferences' own objective has the weight that these leave of 1.
        reference: `cached` log-probs, LoRA's `adapter_off` or `frozen_adapter`, a `copy`, its codes in `fp8`, or
            `auto`: the cheapest.
        reference_sync: how the reference follows the policy (TR-DPO, EMA): {alpha: 0.6, every: 512}. Null: it stays.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        loss: str | dict[str, float] = "sigmoid",
        loss_args: dict[str, Any] | None = None,
        beta: float | None = None,
        label_smoothing: float | None = None,
        divergence: Divergence = "reverse_kl",
        divergence_alpha: float = 0.5,
        weighting: Weighting | None = None,
        ld_alpha: float | None = None,
        sft_weight: float = 0.0,
        margins: dict[str, float] | None = None,
        reference: ReferenceKind = "auto",
        reference_sync: ReferenceSync | None = None,
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        super().__init__(
            policy=policy,
            reference=reference,
            reference_sync=reference_sync,
            optim=optim,
            micro_batch_tokens=micro_batch_tokens,
        )
        self.save_hyperparameters()
        check_weighting(weighting)
        self.margins = dict(margins or {})
        self.pair_loss = PairObjective(
            loss,
            loss_args,
            beta=beta,
            label_smoothing=label_smoothing,
            margins=self.margins,
            divergence=divergence,
            alpha=divergence_alpha,
            weighted=weighting is not None,
        )
        if ld_alpha is not None and not 0 <= ld_alpha <= 1:
            raise UserError(f"ld_alpha is {ld_alpha}; it must lie between 0 and 1")
        if not 0 <= sft_weight < math.inf:
            raise UserError(f"sft_weight is {sft_weight}; it must not be negative, and finite")
        if sft_weight and "sft" in self.pair_loss.weights:
            raise UserError(f"sft_weight is {sft_weight}, and the mix has sft already; leave one of them out")
        self.beta, self.label_smoothing = self.pair_loss.beta, self.pair_loss.label_smoothing
        self.ld_alpha, self.weighting, self.sft_weight = ld_alpha, weighting, sft_weight
        if sft_weight:
            self.loss_terms = {"loss/dpo": 1.0, "loss/sft": sft_weight}

    def prepare_data(self) -> None:
        """Look for margins in the rows while there is no model yet; `predict` needs none."""
        if self.margins and follows(self.trainer.datamodule):  # type: ignore[attr-defined]
            raise UserError("margins need rows that are all known; with data.follow more arrive: leave one of them out")
        if self.margins and self.trainer.state.fn != TrainerFn.PREDICTING:
            check_margin_columns(self.rows_ahead(), self.margins)

    def preference(self, micro: GroupBatch, stats: TokenStats, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
        """Name -> share of the loss, dpo and where it has a weight sft; and metrics."""
        parts, metrics = super().preference(micro, stats, counts)
        if self.sft_weight:
            assert stats.logps is not None
            nll, weights = -micro.pair(micro.mean_tokens(stats.logps))[0], group_weights(micro)
            parts["sft"] = self.sft_weight * share(nll, weights, counts.prompts)
            metrics |= {"loss/dpo": metrics.pop("loss"), "loss/sft": weighted(nll, weights)}
        return parts, metrics

    def log_ratios(self, micro: GroupBatch, logps: Tensor) -> PairLogRatios:
        """Policy against reference, from the policy's token log-probs [C]."""
        reference = self.reference_logps(micro)
        scale = 1.0 if self.ld_alpha is None else length_desensitised(micro, self.ld_alpha)
        chosen, rejected = micro.pair(micro.sum_tokens(reference * scale))
        return pairs_of(
            micro,
            (logps - reference) * scale,
            margin=margin_of(micro, self.margins) if self.margins else None,
            share=1 - sum(self.margins.values()),
            reference_delta=chosen - rejected,
            chosen_nll=-micro.pair(micro.sum_tokens(logps))[0],
        )

    def compared(self, batch: GroupBatch) -> GroupBatch:
        return self.referenced(batch)

    def pair_metrics(self, micro: GroupBatch, pairs: PairLogRatios, logps: Tensor) -> Metrics:
        distance = (pairs.chosen**2 + pairs.rejected**2) / 4
        return super().pair_metrics(micro, pairs, logps) | {"kl/data": weighted(distance, group_weights(micro))}

    def predict_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:
        logps = self.engine(batch).logps
        assert logps is not None
        ratios = batch.sum_tokens(logps - self.reference_logps(batch))
        beta = self.beta_of(batch)
        beta = beta[batch.group_of] if isinstance(beta, Tensor) else beta
        return self.pair_rows(batch, logps=batch.sum_tokens(logps), reward=beta * ratios)

    def preference_gaps(self, batch: GroupBatch) -> Tensor:
        """[P] delta of each pair, without gradient; of a batch of any size."""
        return pair_gaps(batch, self.policy, self.engine, self.log_ratios, self.micro_batch_tokens)
