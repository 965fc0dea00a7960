"""The preference that a policy has itself between the completions of pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from alignment.batches import GroupBatch
from alignment.causal_lm import evaluating
from alignment.logprobs import LogProbEngine
from alignment.pair_losses import PairLogRatios
from alignment.sharding import in_step

PLACE = "place"


@torch.no_grad()
def pair_gaps(
    batch: GroupBatch,
    policy: nn.Module,
    engine: LogProbEngine,
    log_ratios: Callable[[GroupBatch, Tensor], PairLogRatios],
    max_tokens: int | None,
) -> Tensor:
    """[P] delta of each pair in nats, without gradient, as evaluation sees the policy (no dropout).

    Args:
        batch: any number of pairs, read in micro-batches of at most `max_tokens` tokens.
        log_ratios: (pairs, the policy's token log-probs [C]) -> what delta is of: policy against reference, or without
            a reference the policy alone.
    """
    gaps = torch.zeros(batch.num_prompts, device=batch.device)
    with evaluating(policy):
        batch = batch.with_rows(**{PLACE: batch.group_of})
        for micro in in_step(policy, batch.split(max_tokens), batch):
            logps = engine(micro).logps
            assert logps is not None
            gaps[micro.pair(micro.rows[PLACE])[0]] = log_ratios(micro, logps).delta.float()
    return gaps
