"""What modules share that learn from preference pairs by a loss of `PairLogRatios`: DPO, SimPO, ORPO, CPO.

A loss may have to know the whole batch before it can judge a pair (`alignment.batch_losses`). `whole_batch` finds that
out first: from the masks alone where they suffice, else by a pass without gradient over the micro-batches of every
rank. What it finds travels with the pairs as row values, so the update itself is like any other. A batch that one
micro-batch of one process holds needs no such pass: its own forward pass knows all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.logprobs import TokenStats
from alignment.losses import share, weighted
from alignment.metrics import Metrics
from alignment.module import PolicyMixin
from alignment.pair_losses import PairLogRatios
from alignment.pair_objective import PairObjective
from alignment.pairs import pair_gaps
from alignment.sharding import is_sharded
from alignment.update import Counts, group_weights

Weighting = Literal["wpo"]

WHOLE = "whole/"
"""Row values under this are what a loss knows of the whole batch, the same for both completions of a pair."""
_PLACE = "place"
_WEIGHT, _BETA = "weight", "beta"


class PairedMixin(PolicyMixin):
    """Base of modules whose loss is one of pairs.

    A subclass sets `pair_loss`, `beta`, `label_smoothing` and, for WPO, `weighting`, and defines `log_ratios`.

    Attributes:
        pair_loss: the loss.
        loss_memory: what losses remember from batch to batch (bco's reward shift); in the checkpoint.
    """

    reads = "preference"
    moving: ClassVar[tuple[str, ...]] = ("beta",)

    pair_loss: PairObjective
    beta: float
    label_smoothing: float
    weighting: Weighting | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.loss_memory: dict[str, float] = {}

    def setup(self, stage: str) -> None:
        """What beta and label smoothing came to where the loss's own count: told, and from now on the hyper-parameter,
        in the log and in checkpoints."""
        super().setup(stage)
        own = {name: v for name, v in self.pair_loss.own.items() if name in self.hparams and self.hparams[name] is None}
        if not own:
            return
        logged: Any = self._hparams_initial  # `hparams_initial` is a copy
        for name, value in own.items():
            self.hparams[name] = logged[name] = value
        told = ", ".join(f"{name} is {value:g}" for name, value in own.items() if value)
        if told:
            rank_zero_info(f"{told}: the default of loss {', '.join(self.pair_loss.weights)}")

    def log_ratios(self, micro: GroupBatch, logps: Tensor) -> PairLogRatios:
        """What the loss looks at, from the policy's token log-probs [C]."""
        raise TypeError(f"{type(self).__name__} must define log_ratios(micro, logps)")

    def compared(self, batch: GroupBatch) -> GroupBatch:
        """The batch with what `log_ratios` needs beside the policy, for one that is read twice; here nothing."""
        return batch

    def read(self, micro: GroupBatch, **asked: Any) -> TokenStats:
        """The policy's tokens, as the engine is asked for them."""
        return self.engine(micro, **asked)

    @property
    def asked(self) -> dict[str, Any]:
        """What the loss asks the engine for beside token log-probs."""
        return {"collision": True} if self.weighting == "wpo" else {}

    # ------------------------------------------------------------------ the loss

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        parts, metrics = self.preference(micro, self.read(micro, **self.asked), counts)
        return torch.stack([*parts.values()]).sum(), metrics

    def preference(self, micro: GroupBatch, stats: TokenStats, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
        """Name -> this micro-batch's share of that part of the loss, here `dpo` alone; and metrics."""
        assert stats.logps is not None
        pairs = self.informed(micro, self.log_ratios(micro, stats.logps))
        losses, metrics = self.pair_losses(micro, pairs, stats)
        metrics |= {"loss": weighted(losses, group_weights(micro)), **self.judged(micro, pairs, losses)}
        parts = {"dpo": share(losses, self.pair_weights(micro, counts), counts.prompts)}
        return parts, metrics | self.pair_metrics(micro, pairs, stats.logps)

    def pair_losses(self, micro: GroupBatch, pairs: PairLogRatios, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """[P] loss of each pair; the metrics `loss/NAME` of each loss of a mix, and `wpo/weight`."""
        weights = group_weights(micro)
        metrics: Metrics = {}
        terms = self.pair_loss.terms(pairs, self.beta_of(micro), self.label_smoothing)
        if self.weighting == "wpo":
            trust = wpo_weights(micro, stats)
            terms = {name: t * trust if self.pair_loss.weighable(name) else t for name, t in terms.items()}
            metrics["wpo/weight"] = weighted(trust, weights)
        if len(terms) > 1:
            metrics |= {f"loss/{name}": weighted(values, weights) for name, values in terms.items()}
        return self.pair_loss.total(terms), metrics

    def beta_of(self, micro: GroupBatch) -> float | Tensor:
        """Beta of these pairs: one for all, or [P]."""
        return self.beta

    def pair_weights(self, micro: GroupBatch, counts: Counts) -> Tensor:
        """[P] weight of each pair in the preference loss; 0 for one with nothing to compare."""
        return group_weights(micro)

    def judged(self, micro: GroupBatch, pairs: PairLogRatios, losses: Tensor) -> Metrics:
        """Further metrics, of pairs and the loss of each [P]."""
        return {}

    def pair_metrics(self, micro: GroupBatch, pairs: PairLogRatios, logps: Tensor) -> Metrics:
        """Metrics that every loss of pairs has; rewards are beta times the log-ratios."""
        weights, beta = group_weights(micro), self.beta_of(micro)
        chosen_logps, rejected_logps = micro.pair(micro.sum_tokens(logps))
        return {
            "rewards/chosen": weighted(beta * pairs.chosen, weights),
            "rewards/rejected": weighted(beta * pairs.rejected, weights),
            "rewards/margins": weighted(beta * pairs.delta, weights),
            "rewards/accuracies": weighted((pairs.chosen > pairs.rejected).double(), weights),
            "logps/chosen": weighted(chosen_logps, weights),
            "logps/rejected": weighted(rejected_logps, weights),
            "delta": weighted(pairs.delta, weights),
            "beta": weighted(beta * torch.ones_like(weights), weights),
        }

    # ------------------------------------------------------------------ the whole batch

    def informed(self, micro: GroupBatch, pairs: PairLogRatios) -> PairLogRatios:
        """The pairs with what the loss must know of the whole batch.

        Raises ValueError on several ranks for a batch that has not been through `whole_batch`.
        """
        if not self.pair_loss.looks_around:
            return pairs
        known = [name for name in micro.rows if name.startswith(WHOLE)]
        told: Mapping[str, Tensor] = {name.removeprefix(WHOLE): micro.pair(micro.rows[name])[0] for name in known}
        if not told:
            if distributed.world_size() > 1:
                raise ValueError("this loss looks at the whole batch; call whole_batch(batch) before it is split")
            told = self._look_around(pairs.detached(), group_weights(micro), self.beta_of(micro))
        return replace(pairs, whole=told)

    def whole_batch(self, batch: GroupBatch) -> GroupBatch:
        """The batch with what the loss must know of all of it. A collective where there are several ranks."""
        if not self.pair_loss.looks_around:
            return batch
        bound = self.micro_batch_tokens
        fits = bound is None or batch.num_prompts <= 1 or int(batch.group_tokens().sum()) <= bound
        if distributed.world_size() == 1 and fits:
            return batch
        if not self.pair_loss.masks_suffice:
            batch = self.compared(batch)
        mine = self._scan(batch)
        gathered: list[Any] = distributed.all_gather_objects({n: v.cpu() for n, v in mine.items()})
        filled = [part for part in gathered if part]
        if not filled:
            return batch
        every = {name: torch.cat([part[name] for part in filled]) for name in filled[0]}
        weights, beta = every.pop(_WEIGHT), every.pop(_BETA)
        told = self._look_around(PairLogRatios(**every), weights, beta)  # type: ignore[arg-type]
        before = sum(len(part[_WEIGHT]) for part in gathered[: distributed.rank()] if part)
        own = slice(before, before + batch.num_prompts)
        return batch.with_rows(
            **{WHOLE + name: value[own].repeat_interleave(2).to(batch.device) for name, value in told.items()}
        )

    def _look_around(self, pairs: PairLogRatios, weights: Tensor, beta: float | Tensor) -> Mapping[str, Tensor]:
        return self.pair_loss.whole(pairs, weights, beta, self.loss_memory, self.training)

    def _beside(self, batch: GroupBatch) -> dict[str, Tensor]:
        """[P] weight and beta of each pair."""
        weights = group_weights(batch)
        return {_WEIGHT: weights, _BETA: self.beta_of(batch) * torch.ones_like(weights)}

    @torch.no_grad()
    def _scan(self, batch: GroupBatch) -> dict[str, Tensor]:
        """Name -> [P] of this rank's pairs, in the order of the batch; empty for an empty one."""
        if batch.num_prompts == 0 and (self.pair_loss.masks_suffice or not is_sharded(self)):
            return {}
        if self.pair_loss.masks_suffice:
            tokens = torch.zeros(len(batch.completion_ids), device=batch.device)
            return {**pairs_of(batch, tokens).tensors(), **self._beside(batch)}
        batch = batch.with_rows(**{_PLACE: torch.arange(batch.num_completions, device=batch.device)})
        parts: dict[str, list[Tensor]] = {}
        for micro in self.micro_batches(batch):
            logps = self.read(micro).logps
            assert logps is not None
            found = {**self.log_ratios(micro, logps).tensors(), **self._beside(micro)}
            found[_PLACE] = micro.pair(micro.rows[_PLACE])[0]
            for name, value in found.items():
                parts.setdefault(name, []).append(value)
        if batch.num_prompts == 0:
            return {}  # and has taken part
        joined = {name: torch.cat(values) for name, values in parts.items()}
        order = joined.pop(_PLACE).argsort()
        return {name: value[order] for name, value in joined.items()}

    # ------------------------------------------------------------------ state

    def training_state(self) -> dict[str, Any]:
        return {**super().training_state(), "loss_memory": dict(self.loss_memory)}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        super().load_training_state(state)
        self.loss_memory = dict(state["loss_memory"])


class ReferenceFreeMixin(PairedMixin):
    """Base of modules whose loss looks at the policy's log-probs themselves.

    Attributes:
        means: whether rewards are of mean log-probs, not of summed ones.
    """

    means: bool

    def begin(self, loss: str, beta: float, label_smoothing: float, sft_weight: float, **settings: Any) -> None:
        """Called by the constructor: a loss with settings of its own, and the weight of the chosen completions' NLL."""
        if not 0 <= sft_weight < math.inf:
            raise UserError(f"sft_weight is {sft_weight}; it must not be negative, and finite")
        mix = {loss: 1.0, "sft": sft_weight} if sft_weight else {loss: 1.0}
        self.pair_loss = PairObjective(mix, settings, beta=beta, label_smoothing=label_smoothing, reference=False)
        self.beta, self.label_smoothing = self.pair_loss.beta, self.pair_loss.label_smoothing

    def pair_metrics(self, micro: GroupBatch, pairs: PairLogRatios, logps: Tensor) -> Metrics:
        return super().pair_metrics(micro, self.rewarded(micro, logps) if self.means else pairs, logps)

    def preference_gaps(self, batch: GroupBatch) -> Tensor:
        """[P] delta of each pair as rewards see it, without gradient; of a batch of any size."""
        return pair_gaps(batch, self.policy, self.engine, self.rewarded, self.micro_batch_tokens)

    def rewarded(self, micro: GroupBatch, logps: Tensor) -> PairLogRatios:
        """What rewards are beta times: sums or means of log-probs [C]."""
        if not self.means:
            return self.log_ratios(micro, logps)
        return pairs_of(micro, logps / micro.scored_lengths().clamp(min=1)[micro.row_of()])

    def log_ratios(self, micro: GroupBatch, logps: Tensor) -> PairLogRatios:
        """Log-probs [C] themselves, as if every completion were as likely under a reference."""
        return pairs_of(micro, logps, chosen_nll=-micro.pair(micro.sum_tokens(logps))[0])

    def predict_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:
        logps = self.engine(batch).logps
        assert logps is not None
        reward = batch.mean_tokens(logps) if self.means else batch.sum_tokens(logps)
        return self.pair_rows(batch, logps=batch.sum_tokens(logps), reward=self.beta * reward)


def pairs_of(micro: GroupBatch, ratios: Tensor, **more: Any) -> PairLogRatios:
    """Pairs from one value per token [C], summed over scored ones; `more` are further fields."""
    chosen, rejected = micro.pair(micro.sum_tokens(ratios))
    chosen_tokens, rejected_tokens = micro.pair(micro.scored_lengths().clamp(min=1))
    return PairLogRatios(
        chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens, **more
    )


def wpo_weights(micro: GroupBatch, stats: TokenStats) -> Tensor:
    """[P] how likely the policy itself is to write the pair: the product over both completions of

        exp(mean over scored tokens of log pi(token) - log sum_v pi(v)^2)

    without gradient. Zhou et al. 2024 (arXiv 2406.11827), equation 2 with sampled alignment.
    """
    assert stats.logps is not None
    assert stats.collision is not None
    chosen, rejected = micro.pair(micro.mean_tokens(stats.logps.detach() - stats.collision).exp())
    return chosen * rejected


def check_weighting(weighting: str | None) -> None:
    """Raise UserError for a weighting that there is not."""
    if weighting not in (None, "wpo"):
        raise UserError(f"weighting '{weighting}' is not known; use wpo, or null for none")
