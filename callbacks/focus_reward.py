"""Gives a reward that never rises the trunk to itself for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from alignment.errors import UserError
from alignment.events import record_event
from alignment.watching import HasHeads, check_validates


class FocusReward(Callback):
    """A reward that has not risen for some evaluations and whose head has little weight in the fusion: the other heads
    are frozen for some optimizer steps, then thawed.

    An evaluation is a validation; the reward's value there is `val/rewards/NAME/mean`. Events `focus_reward` and
    `focus_reward_end`. It needs a policy with heads (modules.DecoupledPO) and validation data.

    Args:
        evaluations: without a rise, in a row; counted anew after a focus.
        steps: optimizer steps that the other heads stand still.
        share: little weight is a mean fusion weight, since the last evaluation, below this share of an even one.
        min_rise: a value this much above the best one so far is a rise.
    """

    def __init__(self, evaluations: int = 5, steps: int = 50, share: float = 0.5, min_rise: float = 0.0) -> None:
        if evaluations < 1 or steps < 1 or not 0 < share <= 1 or not 0 <= min_rise < math.inf:
            raise UserError(
                f"callbacks.FocusReward: evaluations is {evaluations}, steps {steps}, share {share} and min_rise "
                f"{min_rise}; evaluations and steps are at least 1, share above 0 and at most 1, min_rise at least 0"
            )
        self.evaluations, self.steps, self.share, self.min_rise = evaluations, steps, share, min_rise
        self.best: dict[str, float] = {}
        self.waited: dict[str, int] = {}
        self.focus: str | None = None
        self._held: list[str] = []  # the heads that this callback has frozen
        self._until = 0
        self._weights: dict[str, float] = {}
        self._updates = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, HasHeads):
            raise UserError(
                f"callbacks.FocusReward needs a policy with heads (modules.DecoupledPO), not a "
                f"{type(pl_module).__name__}; leave the callback out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_validates(trainer, self, "rewards")

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Mapping[str, float]) -> None:
        assert isinstance(module, HasHeads)
        if self.focus is not None and trainer.global_step >= self._until:
            module.frozen -= set(self._held)
            record_event(trainer, "focus_reward_end", f"{', '.join(self._held)} learn again beside {self.focus}")
            self.focus, self._held = None, []
        if len(module.alpha) > 1:
            self._updates += 1
            for name, weight in module.alpha.items():
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        assert isinstance(pl_module, HasHeads)
        for name in self._weights:
            self._look(name, trainer.callback_metrics.get(f"val/rewards/{name}/mean"))
        means = {name: total / self._updates for name, total in self._weights.items()}
        little = {name: mean for name, mean in means.items() if mean < self.share / len(means)}
        flat = [name for name in little if self.waited.get(name, 0) >= self.evaluations]
        if flat and self.focus is None:
            self._begin(trainer, pl_module, min(flat, key=little.__getitem__), means)
        self._weights, self._updates = {}, 0

    def _look(self, name: str, value: Any) -> None:
        if value is None or not math.isfinite(value := float(value)):
            return
        best = self.best.get(name)
        if best is None or value > best + self.min_rise:
            self.best[name], self.waited[name] = value, 0
        else:
            self.waited[name] = self.waited.get(name, 0) + 1

    def _begin(self, trainer: L.Trainer, module: HasHeads, name: str, means: Mapping[str, float]) -> None:
        held = [other for other in means if other != name and other not in module.frozen]
        if not held:
            return
        self.focus, self._held, self._until = name, held, trainer.global_step + self.steps
        module.frozen |= set(held)
        record_event(
            trainer,
            "focus_reward",
            f"{name} has not risen above {self.best[name]:.3g} for {self.waited[name]} evaluations, at a mean fusion "
            f"weight of {means[name]:.2g}: the heads of {', '.join(held)} stand still for {self.steps} steps",
        )
        self.waited[name] = 0

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": dict(self.best),
            "waited": dict(self.waited),
            "focus": self.focus,
            "held": list(self._held),
            "until": self._until,
            "weights": dict(self._weights),
            "updates": self._updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited = dict(state_dict["best"]), dict(state_dict["waited"])
        self.focus, self._held = state_dict["focus"], list(state_dict["held"])
        self._until, self._updates = int(state_dict["until"]), int(state_dict["updates"])
        self._weights = dict(state_dict["weights"])
