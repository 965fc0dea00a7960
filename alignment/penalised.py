"""PenalisedMixin: modules whose policy is held back by a reference and by its own entropy.

What rollouts leave behind per token (`measure`), the penalties in the loss (`penalties`), and coefficients that follow
what a rollout showed (`follow`). `alignment.penalties` has the settings and the formulas.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from alignment import distributed, memory
from alignment.batches import GroupBatch
from alignment.causal_lm import evaluating, is_low_precision
from alignment.errors import UserError
from alignment.experience import ENTROPY, REF_LOGPS
from alignment.full_kl import Head
from alignment.kl import kl_metric
from alignment.logprobs import TokenStats
from alignment.metrics import Metrics
from alignment.objective import KEPT, OLD_LOGPS
from alignment.optim import OptimConfig
from alignment.penalties import EntropyConfig, EntropyTerm, KLConfig, KLPenalty
from alignment.policy import PolicyConfig, base_model
from alignment.policy_losses import entropy_bonus, entropy_threshold, high_entropy
from alignment.reference_sync import ReferenceSync, SyncedMixin
from alignment.rollout import SAMPLER_LOGPS
from alignment.settings import as_config
from alignment.update import Counts

log = logging.getLogger(__name__)

OnlineReference = Literal["auto", "adapter_off", "frozen_adapter", "copy", "fp8"]


class PenalisedMixin(SyncedMixin):
    """PolicyMixin with a KL to a reference and an entropy bonus.

    Args:
        temperature: of all log-probs: the one that completions are sampled at.
        kl, entropy, reference, reference_sync: see `alignment.online.OnlineMixin`.
    """

    samples_itself: bool = True
    """Whether completions are drawn by the policy in this process, not by another engine with its weights."""
    entropy_possible: bool = True
    """Whether this policy can have an entropy bonus."""

    def __init__(
        self,
        *,
        policy: PolicyConfig,
        temperature: float,
        kl: KLConfig,
        entropy: EntropyConfig,
        reference: OnlineReference,
        reference_sync: ReferenceSync | None,
        optim: OptimConfig,
        micro_batch_tokens: int | None,
    ) -> None:
        super().__init__(
            policy=policy,
            reference=reference,
            reference_sync=reference_sync,
            optim=optim,
            micro_batch_tokens=micro_batch_tokens,
        )
        self.temperature = temperature
        self.kl = KLPenalty(as_config(KLConfig, kl))
        self.entropy = EntropyTerm(as_config(EntropyConfig, entropy))
        for strength in (self.kl.strength, self.entropy.strength):
            self.schedulables.register(strength)
        self.reference_kind: OnlineReference = reference
        if reference not in (kinds := get_args(OnlineReference)):
            raise UserError(f"reference is '{reference}'; for sampled completions it is one of {', '.join(kinds)}")
        if self.reference_sync is not None and not self.kl.needs_reference:
            raise UserError(
                "reference_sync moves a reference, and this run has none: set kl.coefficient above 0, or kl.measure, "
                "or leave reference_sync out"
            )

    def build_parts(self) -> None:
        super().build_parts()
        if self.kl.needs_reference:
            self.make_reference(self.cheapest_kind if self.reference_kind == "auto" else self.reference_kind)
        if self.kl.in_loss and self.kl.full:
            Head.of(self.policy)  # what is wrong with it is better known before the first rollout

    def planned_reference(self) -> memory.ResolvedReference:
        """What the estimate of memory counts."""
        if not self.kl.needs_reference:
            return "none"
        return self.cheapest_kind if self.reference_kind == "auto" else self.reference_kind

    # ------------------------------------------------------------------ what a rollout leaves behind

    def measure(self, micro: GroupBatch) -> dict[str, Tensor]:
        """Token tensors [C] that updates need, computed under the policy that sampled; without gradient."""
        found: dict[str, Tensor] = {}
        if self.kl.needs_reference:
            found[REF_LOGPS] = self.reference.token_logps(micro, self.temperature)
        if self.measures_policy:
            with evaluating(self.policy):
                found |= self.measure_policy(micro)
        return found

    def measure_policy(self, micro: GroupBatch) -> dict[str, Tensor]:
        """The part of `measure` that runs the policy, in the mode it sampled in."""
        stats = self.engine(micro, entropy=self._needs_entropies, temperature=self.temperature)
        return self.old_stats(stats)

    def old_stats(self, stats: TokenStats) -> dict[str, Tensor]:
        """What is kept of a pass under the policy that sampled."""
        assert stats.logps is not None
        found = {OLD_LOGPS: stats.logps}
        if self._needs_entropies:
            assert stats.entropy is not None
            found[ENTROPY] = stats.entropy
        return found

    @property
    def measures_policy(self) -> bool:
        """Whether the policy's own log-probs are computed once more after sampling: the engine that sampled computes
        others, or sampling is not exact and they are compared with the reference's or start several updates."""
        compared = self.updates_per_batch > 1 or self.kl.in_reward
        return (compared and not self._exact_sampler) or not self.samples_itself or self._needs_entropies

    @property
    def _needs_entropies(self) -> bool:
        return self.entropy.config.keep is not None or self.entropy.controller is not None

    @property
    def _exact_sampler(self) -> bool:
        """Whether the sampler's log-probs are the trainer's up to rounding in fp32."""
        exact = not is_low_precision(base_model(self.policy))
        return exact and not self.dropout_on and str(self.trainer.precision) == "32-true"

    def keep_high_entropy(self, batch: GroupBatch) -> GroupBatch:
        """With the mask of `entropy.keep`, if there is one. A collective: give it the whole batch."""
        keep = self.entropy.config.keep
        if keep is None:
            return batch
        entropy = batch.tokens.get(ENTROPY, torch.zeros(0, device=batch.device))
        kept = high_entropy(entropy, batch.scored, entropy_threshold(entropy, batch.scored, keep))
        return batch.with_tokens(**{KEPT: kept.float()})

    # ------------------------------------------------------------------ penalties

    @property
    def penalises(self) -> bool:
        """Whether `penalties` may be a part of the loss."""
        entropy = self.entropy
        return bool(self.kl.in_loss or entropy.config.coefficient or entropy.controller or entropy.coefficient)

    def old_logps(self, batch: GroupBatch) -> Tensor:
        """[C] log-probs under the policy that sampled."""
        return batch.tokens.get(OLD_LOGPS, batch.tokens[SAMPLER_LOGPS])

    def completion_kl(self, batch: GroupBatch) -> Tensor:
        """[N] nats between the policy that sampled and the reference, summed over each completion's scored tokens."""
        return batch.sum_tokens(self.rollout_kl(batch))

    def rollout_kl(self, batch: GroupBatch) -> Tensor:
        """[C] the same per token."""
        ref = batch.tokens.get(REF_LOGPS, torch.zeros_like(self.old_logps(batch)))
        return self.kl.sampled(self.old_logps(batch), ref, batch.scored)

    def penalties(self, micro: GroupBatch, stats: TokenStats, counts: Counts) -> tuple[Tensor, Metrics]:
        """(share of the KL in the loss and of the entropy bonus, their metrics), from what `token_stats` gave."""
        assert stats.logps is not None
        assert stats.entropy is not None
        weights = micro.scored.double() * micro.weights[micro.row_of()]
        metrics: Metrics = {"entropy": kl_metric(stats.entropy, weights)}
        total = stats.logps.new_zeros(())
        if self.entropy.coefficient:
            total = total + entropy_bonus(stats.entropy, micro, counts, self.entropy.coefficient)
        if self.kl.in_loss:
            values = self._token_kl(micro, stats)
            if self.kl.coefficient:
                total = total + self.kl.coefficient * self.reduce(values, micro, counts)
            metrics["kl"] = kl_metric(values, weights)
        return total, metrics

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        """[C] -> this micro-batch's share, under the reduction of the algorithm's policy loss."""
        raise TypeError(f"{type(self).__name__} must define reduce(values, micro, counts)")

    def token_stats(self, micro: GroupBatch, *, states: bool = False) -> TokenStats:
        """Log-probs and entropies of the policy, and with `states`, or for a full-vocabulary KL, the states that
        predict each token."""
        hidden = states or (self.kl.in_loss and self.kl.full)
        return self.engine(micro, entropy=True, hidden="before" if hidden else None, temperature=self.temperature)

    def _token_kl(self, micro: GroupBatch, stats: TokenStats) -> Tensor:
        assert stats.logps is not None
        if not self.kl.full:
            return self.kl.sampled(stats.logps, micro.tokens[REF_LOGPS], micro.scored, micro.tokens.get(OLD_LOGPS))
        assert stats.hidden is not None
        ref_hidden, ref_head = self.reference.states(micro)
        return self.kl.exact(micro, stats.hidden, Head.of(self.policy), ref_hidden, ref_head, self.temperature)

    def follow(self, batch: GroupBatch) -> Metrics:
        """Let the coefficients follow what the rollout showed. A collective: give it the whole batch.

        `kl` here, where it is part of the reward, in nats per token; `objective/kl` in nats per completion (TRL's
        name); the coefficients that the batch was trained with.
        """
        metrics: Metrics = {}
        one = torch.ones((), dtype=torch.float64)
        if self.entropy.controller is not None:
            self.entropy.controller.update(_mean_over_ranks(batch.tokens.get(ENTROPY), batch.scored)[0])
        if self.entropy.coefficient or self.entropy.controller is not None:
            metrics["entropy_coefficient"] = (one * self.entropy.coefficient, one)
        if self.kl.needs_reference:
            spoken = batch.scored_lengths() > 0
            mean, count = _mean_over_ranks(self.completion_kl(batch), spoken)
            if self.kl.in_reward:
                metrics["kl"] = kl_metric(self.rollout_kl(batch), batch.scored.double())
            if count:
                metrics["objective/kl"] = (one * mean, one)
            # In the reward it has been applied already, in the loss it will be.
            applied = self.kl.coefficient
            self.kl.controller.update(mean, count)
            metrics["kl_coefficient"] = (one * (applied if self.kl.in_reward else self.kl.coefficient), one)
        return metrics

    # ------------------------------------------------------------------ state

    def training_state(self) -> dict[str, Any]:
        configured = {name: self.hparams.get(name) for name in ("kl", "entropy")}
        now = {"kl": self.kl.controller.state_dict(), "entropy": self.entropy.state_dict()}
        return {**super().training_state(), "penalties": {"configured": configured, "now": now}}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        super().load_training_state(state)
        configured, now = state["penalties"]["configured"], state["penalties"]["now"]
        for name, load in (("kl", self.kl.controller.load_state_dict), ("entropy", self.entropy.load_state_dict)):
            if self.hparams.get(name) == configured[name]:
                load(now[name])
            else:
                log.warning("%s begins anew as given; the checkpoint had other settings", name)


def _mean_over_ranks(values: Tensor | None, mask: Tensor) -> tuple[float, int]:
    """(mean over the true entries on all ranks, NaN without any; their number). A collective."""
    kept = (mask.new_zeros(0) if values is None else values[mask]).double()
    total, count = distributed.all_reduce_sum(torch.stack([kept.sum(), torch.ones_like(kept).sum()])).tolist()
    return (total / count if count else float("nan")), int(count)
