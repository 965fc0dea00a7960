"""When the engine that sampled is not the model that trains: correct the update, and watch the gap.

An inference engine computes the same weights with other kernels and another precision, so its log-probs differ from the
trainer's even on the first pass. The corrected policy gradient weighs each token by the ratio of the two, truncated.

Legend: C completion tokens, N completions, as in `alignment.batches`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.metrics import Metrics, mean_of
from alignment.rollout import SAMPLER_LOGPS

# The exponent's bound: e^20 is far above any cap, and finite in fp32.
_MAX_LOG_RATIO = 20.0


def importance_weights(
    batch: GroupBatch, trainer_logps: Tensor, *, cap: float = 2.0, level: Literal["token", "sequence"] = "token"
) -> Tensor:
    """Truncated importance weights min(pi_trainer / pi_sampler, cap), without gradient.

    Args:
        batch: a rollout's batch, which holds the sampler's log-probs.
        trainer_logps: [C] log-probs of the same tokens under the weights that sampled them, by the trainer.
        cap: the largest weight; 2 is the value of the method's authors (https://fengyao.notion.site/off-policy-rl).
        level: one ratio per token, or the product over each completion's scored tokens, the same for all of them.

    Returns:
        [C] in the dtype of `trainer_logps`; 1 where a token is not scored.
    """
    if cap <= 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    log_ratio = _log_ratio(batch, trainer_logps)
    if level == "sequence":
        log_ratio = batch.sum_tokens(log_ratio)[batch.row_of()]
        log_ratio = torch.where(batch.scored, log_ratio, torch.zeros_like(log_ratio))
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp().clamp(max=cap)


def mismatch_metrics(batch: GroupBatch, trainer_logps: Tensor, *, cap: float = 2.0) -> Metrics:
    """How far the sampler is from the trainer, over scored tokens.

    sampler/kl           KL(sampler || trainer) in nats per token, by the non-negative estimator e^d - d - 1 with
                         d = log pi_trainer - log pi_sampler (http://joschu.net/blog/kl-approx.html)
    sampler/logp_gap     mean |d|
    sampler/clipped      share of tokens whose importance weight reaches `cap`
    """
    log_ratio = _log_ratio(batch, trainer_logps).double()
    bounded = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return {
        "sampler/kl": mean_of(bounded.exp() - 1 - bounded, batch.scored),
        "sampler/logp_gap": mean_of(log_ratio.abs(), batch.scored),
        "sampler/clipped": mean_of((bounded.exp() >= cap).double(), batch.scored),
    }


def _log_ratio(batch: GroupBatch, trainer_logps: Tensor) -> Tensor:
    """[C] trainer minus sampler, 0 where a token is not scored."""
    log_ratio = trainer_logps.detach() - batch.tokens[SAMPLER_LOGPS].to(trainer_logps)
    return torch.where(batch.scored, log_ratio, torch.zeros_like(log_ratio))
