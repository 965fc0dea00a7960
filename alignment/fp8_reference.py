"""The reference as FP8 codes of the policy's start: a quarter of a copy in fp32, with its error."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import Tensor, nn

from alignment.batches import GroupBatch
from alignment.fp8 import LOGP_BOUND, Fp8Archive, logp_error
from alignment.full_kl import Head
from alignment.logprobs import TokenStats
from alignment.reference import EngineFactory, Reference
from alignment.sharding import is_sharded

log = logging.getLogger(__name__)

START = "start"


class Fp8Copy(Reference):
    """The policy runs with its archived start, a layer at a time (`alignment.swapping`).

    At step 0 log-probs are within `alignment.fp8.LOGP_BOUND` of the policy's, so that the KL is not quite 0 and the DPO
    loss not quite ln 2; the error on a small batch is measured and told.
    """

    kind = "fp8"

    def __init__(self, policy: nn.Module, engine_factory: EngineFactory) -> None:
        self._policy, self._engine = policy, engine_factory(policy)
        self._archive = Fp8Archive(place="device")
        self._archive.store(START, policy, pinned=True)
        error = logp_error(self._archive, START, policy, self._engine)
        far = f"{error['mean']:.2g} nats from the policy's on average, {error['largest']:.2g} at most"
        log.info("reference=fp8: its log-probs are %s (on a small batch)", far)
        if error["mean"] > LOGP_BOUND["mean"] or error["largest"] > LOGP_BOUND["largest"]:
            log.warning("reference=fp8: its log-probs are %s, more than usual; use copy where the KL matters", far)

    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        values = self._stats(batch, temperature=temperature).logps
        assert values is not None
        return values

    def token_stats(self, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        stats = self._stats(batch, entropy=True)
        assert stats.logps is not None
        assert stats.entropy is not None
        return stats.logps, stats.entropy

    def states(self, batch: GroupBatch) -> tuple[Tensor, Head]:
        with self._archive.evaluating(self._policy, START):
            values = self._engine(batch, logps=False, hidden="before").hidden
            head = Head.of(self._policy)
            # Views of what the head holds now; its parameters are about to be the policy's again, and those of a
            # sharded one in the same memory.
            weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
            if is_sharded(self._policy):
                weight, bias = weight.clone(), None if bias is None else bias.clone()
            head = replace(head, weight=weight, bias=bias)
        assert values is not None
        return values, head

    def _stats(self, batch: GroupBatch, *, entropy: bool = False, temperature: float = 1.0) -> TokenStats:
        with self._archive.evaluating(self._policy, START):
            return self._engine(batch, entropy=entropy, temperature=temperature)
