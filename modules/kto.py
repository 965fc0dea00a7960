"""Kahneman-Tversky optimisation from completions labelled good or bad: Ethayarajh et al. 2024 (arXiv 2402.01306).

    r = sum_t log pi(y_t) - log pi_ref(y_t),  z = max(0, mean over the batch of r(x, y')), without gradient
    L = mean over completions of w_good (1 - sigmoid(beta (r - z))) if good, w_bad (1 - sigmoid(beta (z - r))) if bad

y' is a completion that the batch holds for another prompt, so z estimates the KL of the policy from the reference. It
is that of the whole batch, over all micro-batches and ranks, from a pass of its own without gradient.

Deviations: a completion never stands in for one of its own prompt (the paper and TRL move all on by one, whoever is
next). With `apo_zero` z is 0: the unpaired form of APO-zero (arXiv 2408.06266, equation 7), which needs no such pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.losses import share, weighted
from alignment.metrics import Metrics
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.protocols import SizedBatches
from alignment.reference import ReferenceKind
from alignment.reference_sync import ReferenceSync
from alignment.referenced import ReferencedMixin, ResolvedKind
from alignment.unpaired import kto, mismatched
from alignment.update import Counts, row_weights

OPTIM = OptimConfig(lr=1e-6, warmup_steps=10)
LABEL, BASELINE = "label", "kl"

KTOLoss = Literal["kto", "apo_zero"]


class KTO(ReferencedMixin, L.LightningModule):
    """Trains a policy on completions labelled good or bad. `predict` writes log-probs and rewards of each completion.

    Metrics: `loss`, `kl` (z, nats), `rewards/chosen` (beta r of good completions), `rewards/rejected` (of bad ones),
    `logps/chosen`, `logps/rejected`, `accuracy` (share of completions on the right side of z), `beta`; in validation
    also `rewards/margins`. In validation z is that of the validation batch.

    Args:
        policy: the model to train; it is its own reference before the first step.
        loss: `kto`, or `apo_zero` with the baseline 0.
        beta: strength of the pull to the reference; callbacks may move it during training.
        good_weight, bad_weight: of the two kinds. The paper balances unequal numbers of them: good_weight * good
            completions should be 1 to 1.5 times bad_weight * bad ones.
        reference: LoRA's `adapter_off` or `frozen_adapter`, a `copy`, its codes in `fp8`, or `auto`: the cheapest;
            `cached` only with apo_zero, because the pairs of prompt and completion behind z are not known ahead.
        reference_sync: how the reference follows the policy, see docs/reference.md. Null: it stays.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    reads = "unpaired"
    moving = ("beta",)

    def __init__(
        self,
        policy: PolicyConfig,
        loss: KTOLoss = "kto",
        beta: float = 0.1,
        good_weight: float = 1.0,
        bad_weight: float = 1.0,
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
        if loss not in get_args(KTOLoss):
            raise UserError(f"loss '{loss}' is not known; use {' or '.join(get_args(KTOLoss))}")
        if loss == "kto" and reference == "cached":
            raise UserError("reference=cached does not go with kto: its baseline scores pairs that are not known ahead")
        for name, value in (("beta", beta), ("good_weight", good_weight), ("bad_weight", bad_weight)):
            if not 0 < value < math.inf:
                raise UserError(f"{name} is {value}; it must be positive, and finite")
        self.compares = loss == "kto"
        self.beta, self.good_weight, self.bad_weight = beta, good_weight, bad_weight

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.compares and isinstance(data, SizedBatches) and data.batch_size < 2:
            raise UserError(
                f"data.batch_size is {data.batch_size}; the baseline of kto needs at least 2 prompts in a batch"
            )

    def _resolved_kind(self) -> ResolvedKind:
        kind = super()._resolved_kind()
        return "copy" if kind == "cached" and self.compares else kind

    @torch.no_grad()
    def whole_batch(self, batch: GroupBatch) -> GroupBatch:
        """With the baseline of the batch as the row value `kl`."""
        total = torch.zeros(2, dtype=torch.float64, device=batch.device)
        if self.compares:
            for micro in self.micro_batches(mismatched(batch), keep_groups=False):
                used = (micro.scored_lengths() > 0).double()
                total += torch.stack([(self.log_ratios(micro)[0].double() * used).sum(), used.sum()])
        summed, count = distributed.all_reduce_sum(total)
        baseline = (summed / count.clamp(min=1)).clamp(min=0).float()
        return batch.with_rows(**{BASELINE: baseline.expand(batch.num_completions)})

    def log_ratios(self, micro: GroupBatch) -> tuple[Tensor, Tensor]:
        """([N] policy against reference, [N] log-probs under the policy), summed over scored tokens."""
        logps = self.engine(micro).logps
        assert logps is not None
        return micro.sum_tokens(logps - self.reference_logps(micro)), micro.sum_tokens(logps)

    def train_batch(self, batch: GroupBatch) -> None:
        self.update(self.whole_batch(batch), self.loss, keep_groups=False)

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        ratios, logps = self.log_ratios(micro)
        good, baseline, weights = micro.rows[LABEL] > 0.5, micro.rows[BASELINE], row_weights(micro)
        values = kto(ratios, good, baseline, self.beta) * torch.where(good, self.good_weight, self.bad_weight)
        metrics: Metrics = {
            "loss": weighted(values, weights),
            "kl": weighted(baseline, weights),
            "accuracy": weighted(((ratios > baseline) == good).double(), weights),
            "beta": weighted(torch.full_like(weights, self.beta), weights),
        }
        for side, which in (("chosen", good), ("rejected", ~good)):
            mine = weights * which
            if bool(mine.sum() > 0):
                metrics[f"rewards/{side}"] = weighted(self.beta * ratios, mine)
                metrics[f"logps/{side}"] = weighted(logps, mine)
        return share(values, weights, counts.rows), metrics

    def derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        if not {"rewards/chosen", "rewards/rejected"} <= values.keys():
            return {}
        return {"rewards/margins": values["rewards/chosen"] - values["rewards/rejected"]}

    def predict_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:
        ratios, logps = self.log_ratios(batch)
        rows = self.texts(batch)
        for place, row in enumerate(rows):
            mine = batch.group_of == place
            row |= {"logps": logps[mine].tolist(), "reward": (self.beta * ratios[mine]).tolist()}
        return rows
