"""Supervised fine-tuning.

    L = - sum_t w log pi(y_t | x, y_<t) / sum_t w        over scored completion tokens of the whole batch and all ranks

Only completions are trained on: prompts, masked turns and padding never enter numerator or denominator. The average is
over tokens, not over rows, so a long answer counts as often as it has tokens. Deviations from common practice: the
denominator is that of the whole batch (Hugging Face's accumulation fix of 2024, made a rule), and completions of one
prompt share its computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.losses import share, token_nll, weighted
from alignment.metrics import Metrics
from alignment.module import PolicyMixin
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.update import Counts, row_weights

OPTIM = OptimConfig(lr=2e-5)


class SFT(PolicyMixin, L.LightningModule):
    """Fine-tunes a policy on completions. `predict` writes greedy completions of the prompts.

    Metrics: `loss` (nats per token), `entropy` (nats per token), `val/perplexity`.

    Args:
        policy: the model to train.
        entropy: log the mean token entropy too; it is computed with the log-probs.
        predict_tokens: upper bound of generated tokens per prompt in `predict`.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    reads = "supervised"

    def __init__(
        self,
        policy: PolicyConfig,
        entropy: bool = True,
        predict_tokens: int = 128,
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        super().__init__(policy=policy, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()
        self.entropy = entropy
        self.predict_tokens = predict_tokens

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        stats = self.engine(micro, entropy=self.entropy)
        assert stats.logps is not None
        weights = row_weights(micro)[micro.row_of()] * micro.scored
        nll = token_nll(stats.logps, micro.scored)
        metrics: Metrics = {"loss": weighted(nll, weights)}
        if stats.entropy is not None:
            metrics["entropy"] = weighted(stats.entropy, weights)
        return share(nll, weights, counts.tokens), metrics

    def derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(values["loss"], 700.0))}  # exp overflows a float beyond 709

    def predict_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:
        rows = self.texts(batch)
        for row, ids in zip(rows, self.complete(batch, self.predict_tokens), strict=True):
            references = row.pop("completions")
            row |= {"completion": self.tokenizer.decode(ids), "references": references}
        return rows
