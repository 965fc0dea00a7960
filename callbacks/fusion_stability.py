"""Keeps fusion weights from jumping between the heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from alignment.errors import UserError
from alignment.events import record_event
from alignment.watching import HasHeads

EMA = 0.9
CAUSE = "fusion stability"


class FusionStability(Callback):
    """Raises the bonus for even fusion weights (`fusion.entropy`) while the mean weights jump from update to update.

    The jitter is a moving average, from 0, of sum_k |a_k - a_k'|, a the mean fusion weights of an update, a' those of
    the update before. Metrics: `fusion/jitter`, `fusion/entropy_coefficient`. Event `fusion_stability`. It needs a
    policy with heads whose fusion is trained (modules.DecoupledPO).

    Args:
        limit: jitter above which the bonus is raised.
        factor: what it is multiplied by.
        largest: bound of the bonus.
        cooldown: updates after a raise before the next one.
    """

    def __init__(self, limit: float = 0.1, factor: float = 1.5, largest: float = 1.0, cooldown: int = 50) -> None:
        if not limit > 0 or not 1 < factor < math.inf or not 0 < largest < math.inf or cooldown < 0:
            raise UserError(
                f"callbacks.FusionStability: limit is {limit}, factor {factor}, largest {largest} and cooldown "
                f"{cooldown}; limit and largest are above 0, factor above 1, cooldown at least 0"
            )
        self.limit, self.factor, self.largest, self.cooldown = limit, factor, largest, cooldown
        self.jitter = 0.0
        self._before: dict[str, float] = {}
        self._rest = 0  # updates until the next raise is possible

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        here = "callbacks.FusionStability"
        if not isinstance(pl_module, HasHeads):
            raise UserError(
                f"{here} needs a policy with heads (modules.DecoupledPO), not a {type(pl_module).__name__}; leave the "
                "callback out"
            )
        config = pl_module.fusion_config
        if config.mode != "joint" or not config.entropy:
            raise UserError(
                f"{here} multiplies fusion.entropy, which is {config.entropy:g} in mode {config.mode}; it needs one "
                "above 0 and mode joint"
            )
        pl_module.schedulables["fusion.entropy"].claim(CAUSE)

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Mapping[str, float]) -> None:
        assert isinstance(module, HasHeads)
        now, before = dict(module.alpha), self._before
        if len(now) == 1:  # a batch of one head says nothing of the fusion
            return
        self._before, self._rest = now, max(0, self._rest - 1)
        if now.keys() == before.keys():
            change = sum(abs(now[name] - before[name]) for name in now)
            self.jitter = EMA * self.jitter + (1 - EMA) * change
        if self.jitter > self.limit and not self._rest and 0 < module.fusion_entropy < self.largest:
            had, bonus = module.fusion_entropy, module.schedulables["fusion.entropy"]
            bonus.scale(CAUSE, min(bonus.factor(CAUSE) * self.factor, self.largest / bonus.without(CAUSE)))
            self._rest = self.cooldown + 1
            text = f"fusion weights jump by {self.jitter:.2g} an update: fusion.entropy {had:.3g} -> "
            record_event(trainer, "fusion_stability", f"{text}{module.fusion_entropy:.3g}")
        module.note_values({"fusion/jitter": self.jitter, "fusion/entropy_coefficient": module.fusion_entropy})

    def state_dict(self) -> dict[str, Any]:
        return {"jitter": self.jitter, "before": dict(self._before), "rest": self._rest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.jitter, self._rest = float(state_dict["jitter"]), int(state_dict["rest"])
        self._before = dict(state_dict["before"])
