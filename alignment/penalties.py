"""What holds an online policy back: the divergence from its reference and the entropy bonus, each with a coefficient
that may follow a measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor

from alignment.batches import GroupBatch
from alignment.controllers import AdaptiveEntropy, AdaptiveKL, FixedKL, KLController
from alignment.errors import UserError
from alignment.full_kl import FullKL, Head, full_kl
from alignment.kl import KL_ESTIMATORS, Estimator, token_kl
from alignment.schedulable import Schedulable, of


@dataclass(kw_only=True)
class KLConfig:
    """Divergence from the reference.

    Args:
        coefficient: its weight; at 0 no reference is loaded, unless `measure`.
        estimator: per token k1, k2, k3, k3_is, sym, or the import path of your own; over the whole vocabulary
            full_reverse, full_jeffreys, full_js (in the loss only). See alignment.kl and alignment.full_kl.
        place: `loss` adds it to the loss, `reward` subtracts it from the reward.
        target: hold the divergence near this many nats per completion by moving the coefficient. Null: it stays.
        horizon: completions over which a full error changes the coefficient by 20 %; with `target`.
        ema: share of the old value in a moving average of the measured divergence; with `target`.
        measure: load the reference and log `kl` at coefficient 0 too.
    """

    coefficient: float = 0.0
    estimator: str = "k3"
    place: Literal["loss", "reward"] = "loss"
    target: float | None = None
    horizon: int = 10_000
    ema: float = 0.0
    measure: bool = False


@dataclass(kw_only=True)
class EntropyConfig:
    """Entropy of the policy's tokens.

    Args:
        coefficient: weight of the bonus. With `target`: its value at the start.
        target: raise the bonus while the mean token entropy (nats) is at or below this, lower it above, and apply it
            only below. Null: the coefficient stays.
        step: change of the coefficient per batch; with `target`.
        largest: bound of the coefficient; with `target`.
        keep: train only on this share of the tokens, those with the highest entropy (0.2 in the paper). Null: on all.
    """

    coefficient: float = 0.0
    target: float | None = None
    step: float = 0.005
    largest: float = 1.0
    keep: float | None = None


class KLPenalty:
    """The divergence under one KLConfig: estimator, place and coefficient. `strength` is what may move the latter.

    Raises UserError for settings that contradict each other.
    """

    def __init__(self, config: KLConfig) -> None:
        self.config = config
        self.full = config.estimator in get_args(FullKL)
        self.controller = _kl_controller(config)
        held: dict[str, Any] = {}
        if config.target is not None:
            held = {"follow": of(self.controller, "coefficient"), "writer": "kl.target"}
        blocked = "" if self.needs_reference else "at 0 no reference is loaded; set kl.measure: true"
        self.strength = Schedulable("kl.coefficient", config.coefficient, blocked=blocked, **held)
        self._estimator: Estimator = KL_ESTIMATORS.get("k3" if self.full else config.estimator)
        if config.place not in ("loss", "reward"):
            raise UserError(f"kl.place is '{config.place}'; it is loss or reward")
        if self.full and config.place == "reward":
            raise UserError(f"kl.estimator {config.estimator} is for the loss; in the reward use k1, k2, k3 or sym")

    @property
    def needs_reference(self) -> bool:
        return self.config.coefficient > 0 or self.config.measure

    @property
    def in_loss(self) -> bool:
        """Whether it is a term of the loss. A coefficient that something moved to 0 leaves it there."""
        return self.needs_reference and self.config.place == "loss"

    @property
    def in_reward(self) -> bool:
        return self.needs_reference and self.config.place == "reward"

    @property
    def coefficient(self) -> float:
        return float(self.strength.value)

    def sampled(self, logps: Tensor, ref_logps: Tensor, scored: Tensor, old_logps: Tensor | None = None) -> Tensor:
        """[C] nats from log-probs of the sampled tokens; see `alignment.kl.token_kl`. Under a full-vocabulary estimator
        this is k3, for measurements."""
        return token_kl(self._estimator, logps, ref_logps, scored, old_logps)

    def exact(
        self, batch: GroupBatch, hidden: Tensor, head: Head, ref_hidden: Tensor, ref_head: Head, temperature: float
    ) -> Tensor:
        """[C] nats over the whole vocabulary, 0 at unscored tokens; from states [C, H] that predict each token."""
        at = batch.scored
        kind = cast(FullKL, self.config.estimator)
        values = full_kl(kind, hidden[at], head, ref_hidden[at], ref_head, temperature=temperature)
        return values.new_zeros(len(at)).masked_scatter(at, values)


def _kl_controller(config: KLConfig) -> KLController:
    if config.target is None:
        return FixedKL(coefficient=config.coefficient)
    return AdaptiveKL(
        coefficient=config.coefficient, target=config.target, horizon=config.horizon, ema=config.ema
    )


class EntropyTerm:
    """The entropy bonus under one EntropyConfig. `strength` is what may move its coefficient."""

    def __init__(self, config: EntropyConfig) -> None:
        if config.keep is not None and not 0 < config.keep <= 1:
            raise UserError(f"entropy.keep is {config.keep}; it is a share above 0 and at most 1, or null")
        if not 0 <= config.coefficient < math.inf:
            raise UserError(f"entropy.coefficient is {config.coefficient}; it must be at least 0, and finite")
        self.config = config
        self.controller: AdaptiveEntropy | None = None
        held: dict[str, Any] = {}
        if config.target is not None:
            self.controller = AdaptiveEntropy(
                target=config.target, step=config.step, largest=config.largest, value=config.coefficient
            )
            held = {"follow": of(self.controller, "coefficient"), "writer": "entropy.target"}
        self.strength = Schedulable("entropy.coefficient", config.coefficient, **held)

    @property
    def coefficient(self) -> float:
        return float(self.strength.value)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.controller is None else dict(self.controller.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.controller is not None and state:
            self.controller.load_state_dict(state)
