"""RegularisedMixin: modules whose preference loss is joined by an entropy deficit and a smoothness term, with settings
and weights of domains, and a clip for each component.

`alignment.regularisers` has the terms, `alignment.domains` what domains have of their own, `alignment.component_clip`
the updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.component_clip import ComponentClipConfig, Components, update_at_parameters, update_at_states
from alignment.domains import PREFIX, Domains
from alignment.entropy_deficit import REF_ENTROPY, token_scope
from alignment.errors import UserError
from alignment.experience import REF_LOGPS
from alignment.full_kl import Head
from alignment.logprobs import TokenStats
from alignment.losses import share, weighted
from alignment.metrics import Metrics
from alignment.policy import base_model
from alignment.protocols import FiniteGroups, follows
from alignment.referenced import ReferencedMixin
from alignment.regularisers import UNIT_TERMS, Regularisers, TermCounts, normalised_entropy
from alignment.update import Counts, group_weights

WORST = "worst_domain/accuracies"


class RegularisedMixin(ReferencedMixin):
    """ReferencedMixin for preference losses with terms. A subclass has `preference` from a class behind this one in its
    bases (`modules.DPO`), sets what is listed here before `configure_model`, and names the values that move.

    Attributes:
        beta, lambda_entropy, lambda_smooth: values of pairs whose domain has none of its own.
        sft_weight: weight of the component sft among those of `preference`.
        regularisers: the terms. component_clip, domains: see `modules.GeneralizedRPO`.
        vocabulary: entries of the policy's vocabulary, whose logarithm measures entropies; from `configure_model` on.
    """

    beta: float
    lambda_entropy: float
    lambda_smooth: float
    sft_weight: float
    regularisers: Regularisers
    component_clip: ComponentClipConfig | None
    domains: Domains | None
    vocabulary: int

    if TYPE_CHECKING:  # bodies here would hide those of the class that follows in a module's bases

        @property
        def asked(self) -> dict[str, Any]:
            """What the loss asks the engine for beside token log-probs."""
            ...

        def preference(self, micro: GroupBatch, stats: TokenStats, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
            """Name -> share of the loss, dpo among them; and metrics."""
            ...

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.domains is not None and follows(data):
            raise UserError("domains need rows that are all known; with data.follow more arrive: leave one of them out")
        if self.domains is not None and stage == "fit" and isinstance(data, FiniteGroups):
            validates = self.trainer.limit_val_batches != 0
            self.domains.read(data.groups("train"), data.groups("val") if validates else ())

    def build_parts(self) -> None:
        super().build_parts()
        self.vocabulary = base_model(self.policy).config.get_text_config(decoder=True).vocab_size
        self._head()  # what is wrong with it is better known before the first step

    def _head(self) -> Head | None:
        """What js needs besides states."""
        if self.regularisers.smoothness != "js":
            return None
        return Head.of(self.policy, "smoothness js", "use another smoothness")

    # ------------------------------------------------------------------ values that pairs have

    def value_of(self, what: str, micro: GroupBatch) -> float | Tensor:
        """beta, lambda_entropy or lambda_smooth of each pair [P], or one for all."""
        general = self._general[what]
        if self.domains is None:
            return general
        return self.domains.values(micro, what, general, float(self.schedulables[what].configured))

    @property
    def _general(self) -> Mapping[str, float]:
        return {"beta": self.beta, "lambda_entropy": self.lambda_entropy, "lambda_smooth": self.lambda_smooth}

    def trained(self, term: str) -> bool:
        """Whether `entropy` or `smooth` has a weight now, for all pairs or in some domain."""
        what = f"lambda_{term}"
        own = {} if self.domains is None else self.domains.config.own[what]
        return any(value > 0 for value in (self._general[what], *own.values()))

    @property
    def components_trained(self) -> tuple[str, ...]:
        """Names of the components that have a weight now."""
        terms = [name for name in ("entropy", "smooth") if self.trained(name)]
        return ("dpo", *(["sft"] if self.sft_weight else []), *terms)

    # ------------------------------------------------------------------ the loss and its updates

    def train_batch(self, batch: GroupBatch) -> None:
        batch = self.whole_batch(batch)
        domains = {} if self.domains is None else self.domains.counts(batch, group_weights(batch))
        counts, clip = self.regularisers.counts(batch, domains), self.component_clip
        if clip is None:
            self.update(batch, self.loss, counts=counts)
        elif clip.at == "parameters":
            update_at_parameters(self, batch, self.components, self.components_trained, clip, counts)
        else:  # which reads every micro-batch twice where there are several
            batch = self.referenced(batch)
            update_at_states(self, batch, self.components, self._states, self.components_trained, clip, counts)

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        found = self.components(micro, counts)
        return torch.stack([*found.shares.values()]).sum(), found.metrics

    def evaluation_metrics(self, batch: GroupBatch) -> Metrics:
        return self.components(batch, UNIT_TERMS).metrics

    def _states(self, micro: GroupBatch) -> Tensor:
        hidden = self.engine(micro, logps=False, hidden="before").hidden
        assert hidden is not None
        return hidden

    def components(self, micro: GroupBatch, counts: Counts, states: Tensor | None = None) -> Components:
        """See `alignment.component_clip.ComponentsFn`; `counts` are TermCounts."""
        assert isinstance(counts, TermCounts)
        head = self._head()
        if states is None:
            stats = self.engine(micro, entropy=True, hidden=None if head is None else "before", **self.asked)
        else:
            stats = self.engine.score(micro, states, entropy=True, **self.asked)
        micro = self.with_reference(micro)
        shares, metrics = self.preference(micro, stats, counts)
        if "loss" in metrics:
            metrics["loss/dpo"] = metrics.pop("loss")
        values = {"dpo": shares["dpo"]} | ({"sft": shares["sft"] / self.sft_weight} if self.sft_weight else {})
        for name, (whole, weighed, more) in self._terms(micro, stats, head, counts).items():
            values[name], shares[name] = whole, weighed
            metrics |= more
        trained = self.components_trained
        return Components(
            shares={name: shares[name] for name in trained},
            values={name: values[name].detach().double() for name in trained},
            metrics=metrics | self._token_metrics(micro, stats),
        )

    def _terms(
        self, micro: GroupBatch, stats: TokenStats, head: Head | None, counts: TermCounts
    ) -> dict[str, tuple[Tensor, Tensor, Metrics]]:
        """Name -> (share of R [], share of lambda R [], metrics) of both terms. js without a weight is 0: it is not
        worth its price."""
        assert stats.entropy is not None
        normalised = normalised_entropy(stats.entropy, self.vocabulary)
        entropy = self.regularisers.entropy(micro, normalised, self.vocabulary)
        jumps = self.regularisers.smooth(micro, stats, normalised, head, off=not self.trained("smooth"))
        out = {}
        for name, term, total in (("entropy", entropy, counts.entropy), ("smooth", jumps, counts.smooth)):
            weight = self.value_of(f"lambda_{name}", micro)
            weighed = term.values * (weight[term.pair] if isinstance(weight, Tensor) else weight)
            pairs = group_weights(micro)
            metrics: Metrics = {
                f"loss/{name}": weighted(term.values, term.weights),
                f"penalty/{name}": weighted(weighed, term.weights),
                f"lambda_{name}": weighted(weight * torch.ones_like(pairs), pairs),
            }
            out[name] = (share(term.values, term.weights, total), share(weighed, term.weights, total), metrics)
        return out

    def _token_metrics(self, micro: GroupBatch, stats: TokenStats) -> Metrics:
        assert stats.logps is not None
        assert stats.entropy is not None
        tokens = token_scope(micro, "both")
        metrics = {
            "entropy": weighted(stats.entropy, tokens),
            "p_mean": weighted(stats.logps.exp(), token_scope(micro, self.regularisers.smooth_scope)),
        }
        if REF_ENTROPY in micro.tokens:
            metrics["entropy/reference"] = weighted(micro.tokens[REF_ENTROPY], tokens)
        return metrics

    # ------------------------------------------------------------------ the reference

    def with_reference(self, micro: GroupBatch) -> GroupBatch:
        """With the reference's entropies too where they are the floor: one pass for both."""
        if not self.reference_entropy or REF_ENTROPY in micro.tokens:
            return super().with_reference(micro)
        logps, entropy = self.reference.token_stats(micro)
        return micro.with_tokens(**{REF_LOGPS: logps, REF_ENTROPY: entropy})

    # ------------------------------------------------------------------ domains

    def note_update(self, *, loss: float, grad_norm: float, lr: float, metrics: Metrics) -> None:
        if self.domains is not None and self.domains.config.adaptive:
            self.note_values({f"{PREFIX}/{name}/weight": q for name, q in self.domains.weights.items()})
            if math.isfinite(loss) and math.isfinite(grad_norm):
                self.domains.learn(metrics, self.device)
        super().note_update(loss=loss, grad_norm=grad_norm, lr=lr, metrics=metrics)

    def derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        ends = "/accuracies"
        mine = [v for name, v in values.items() if name.startswith(f"{PREFIX}/") and name.endswith(ends)]
        return super().derived_metrics(values) | ({WORST: min(mine)} if mine else {})

    def training_state(self) -> dict[str, Any]:
        return super().training_state() | {"domains": {} if self.domains is None else dict(self.domains.weights)}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        super().load_training_state(state)
        if self.domains is not None and state.get("domains"):  # a DPO run, which one may go on from, has none
            self.domains.weights = dict(state["domains"])
