"""GeneralizedRPO: a preference loss that keeps the policy's entropy, and its token probabilities smooth.

    L = L_pref + lambda_entropy R_entropy + lambda_smooth R_smooth

L_pref is any loss of `modules.DPO`. R_entropy is the deficit of token entropy below a floor, R_smooth the size of jumps
between the probabilities of neighbouring tokens (`alignment.entropy_deficit`, `alignment.smoothness`). Both are at
least 0, means over tokens of the whole batch, and come from the forward pass that DPO takes anyway.

Described without a paper as "GRPO, Generalized Relative Policy Optimization"; DeepSeek's GRPO is `modules.GRPO`.
Domains may have their own beta and lambdas, and weights that follow their losses (`alignment.domains`); each component
of the loss may have its gradient clipped by itself (`alignment.component_clip`).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from alignment.batches import GroupBatch
from alignment.component_clip import ComponentClipConfig
from alignment.domains import DomainConfig, Domains
from alignment.entropy_deficit import Floor, Scope
from alignment.errors import UserError
from alignment.metrics import Metrics
from alignment.pair_losses import PairLogRatios
from alignment.policy import PolicyConfig
from alignment.regularised import RegularisedMixin
from alignment.regularisers import Regularisers, TermCounts
from alignment.settings import as_config
from alignment.smoothness import Smoothness
from alignment.update import Counts, group_weights
from modules.dpo import DPO


class GeneralizedRPO(RegularisedMixin, DPO):
    """Trains a policy on preference pairs, as DPO does, against loss of entropy and jumps of probability.

    Metrics: those of DPO, with `loss/dpo`, `loss/entropy` (R_entropy), `loss/smooth` (R_smooth), `penalty/entropy` and
    `penalty/smooth` (times lambda; with `loss/dpo` they sum to `loss`), `entropy` (nats, mean over scored tokens),
    `entropy/reference`, `p_mean` (mean token probability), `lambda_entropy`, `lambda_smooth`; with `component_clip`, of
    dpo, sft, entropy and smooth, `grad_norm/NAME` before clipping (at states: `grad_norm/states/NAME`) and
    `grad/clip_coef/NAME`; with `domains` `domain/NAME/loss|accuracies|margins|weight`, `val/worst_domain/accuracies`.

    Args:
        policy: the model to train; it is its own reference before the first step.
        lambda_entropy, lambda_smooth: weights of the terms; 0 leaves one out. Callbacks may move them, like beta.
        entropy_floor: `reference` (of the same token), `uniform` or `constant`.
        entropy_level: with reference the share of its entropy that is the floor (null: all of it); with constant the
            floor itself, entropy over log V, 0 to 1.
        entropy_scope: completions whose tokens count: both, chosen or rejected.
        smoothness: what must not jump: probability, logprob, variance, entropy or js.
        smooth_scope: as entropy_scope; smoothing rejected texts serves nothing.
        component_clip: clip the gradient of each component by itself. Null: only that of the whole.
        domains: what pairs of a domain have of their own. Null: all pairs are alike.
        settings: see modules.DPO.
    """

    moving = ("beta", "lambda_entropy", "lambda_smooth")

    def __init__(
        self,
        policy: PolicyConfig,
        lambda_entropy: float = 0.01,
        lambda_smooth: float = 0.01,
        entropy_floor: Floor = "reference",
        entropy_level: float | None = None,
        entropy_scope: Scope = "both",
        smoothness: Smoothness = "probability",
        smooth_scope: Scope = "chosen",
        component_clip: ComponentClipConfig | None = None,
        domains: DomainConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policy=policy, **settings)
        self.save_hyperparameters()
        for name, value in (("lambda_entropy", lambda_entropy), ("lambda_smooth", lambda_smooth)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name} is {value}; it must not be negative")
        self.lambda_entropy, self.lambda_smooth = lambda_entropy, lambda_smooth
        self.regularisers = Regularisers(
            floor=entropy_floor,
            level=entropy_level,
            entropy_scope=entropy_scope,
            smoothness=smoothness,
            smooth_scope=smooth_scope,
        )
        self.reference_entropy = entropy_floor == "reference"
        self.component_clip = None if component_clip is None else as_config(ComponentClipConfig, component_clip)
        self.domains = None if domains is None else Domains(as_config(DomainConfig, domains))
        self._check_domains()
        terms = dict.fromkeys(("loss/dpo", "penalty/entropy", "penalty/smooth"), 1.0)
        self.loss_terms = terms | ({"loss/sft": self.sft_weight} if self.sft_weight else {})

    def _check_domains(self) -> None:
        """Raise UserError for what a domain cannot have under this loss."""
        config, matched = None if self.domains is None else self.domains.config, self.pair_loss.matched
        if config is None or not matched:
            return
        for what, asked in (("adaptive", config.adaptive), ("beta", bool(config.beta))):
            if asked:
                raise UserError(
                    f"domains.{what} does not go with {', '.join(matched)}: sorted values of different pairs have no "
                    "domain of their own; leave it out, or take another loss"
                )

    def beta_of(self, micro: GroupBatch) -> float | Tensor:
        return self.value_of("beta", micro)

    def pair_weights(self, micro: GroupBatch, counts: Counts) -> Tensor:
        """With adaptive domains, weights under which a mean over pairs is the weighted sum of means over domains."""
        weights = super().pair_weights(micro, counts)
        if self.domains is None or not isinstance(counts, TermCounts) or not counts.domains:
            return weights
        return weights * self.domains.factors(micro, counts.domains)

    def judged(self, micro: GroupBatch, pairs: PairLogRatios, losses: Tensor) -> Metrics:
        metrics = super().judged(micro, pairs, losses)
        if self.domains is None:
            return metrics
        right, margins = (pairs.chosen > pairs.rejected).double(), self.beta_of(micro) * pairs.delta
        weights = group_weights(micro)
        return metrics | self.domains.metrics(micro, weights, loss=losses, accuracies=right, margins=margins)
