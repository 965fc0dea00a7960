"""Loosens a policy that has begun to forget what it could."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from alignment.errors import UserError
from alignment.events import record_event
from alignment.watching import HasEntropyBonus, check_validates

CAUSE = "regression guard"


class RegressionGuard(Callback):
    """A validation score well below its best for some evaluations in a row: the entropy bonus of the policy rises.

    Well below is under best - (1 - share) |best|, for scores above 0 the same as share x best. The bonus is added to
    `entropy.coefficient`, and logged as `entropy_coefficient`. Event `regression_guard`. It works with modules that
    sample (GRPO, GDPO, PPO, MORL, DecoupledPO) and needs validation data.

    Args:
        monitor: the score; more is better.
        share: of the best score so far.
        evaluations: below it in a row, and again after each rise.
        step: what is added to the coefficient.
        largest: most that is added in total.
    """

    def __init__(
        self,
        monitor: str = "val/reward",
        share: float = 0.9,
        evaluations: int = 3,
        step: float = 0.01,
        largest: float = 0.1,
    ) -> None:
        if not 0 < share < 1 or evaluations < 1 or not 0 < step <= largest < math.inf:
            raise UserError(
                f"callbacks.RegressionGuard: share is {share}, evaluations {evaluations}, step {step} and largest "
                f"{largest}; share is between 0 and 1, evaluations at least 1, step above 0 and at most largest"
            )
        self.monitor, self.share, self.evaluations, self.step, self.largest = monitor, share, evaluations, step, largest
        self.best = -math.inf
        self.below = 0
        self.added = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, HasEntropyBonus):
            raise UserError(
                f"callbacks.RegressionGuard needs a module that samples (GRPO, GDPO, PPO, MORL, DecoupledPO), not a "
                f"{type(pl_module).__name__}; leave the callback out"
            )
        if not pl_module.entropy_possible:
            raise UserError("callbacks.RegressionGuard needs an entropy bonus, which fusion.pool=linear cannot have")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, HasEntropyBonus)
        check_validates(trainer, self, "a score")
        if self.added:
            pl_module.entropy.strength.add(CAUSE, self.added)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        known = trainer.callback_metrics
        if self.monitor not in known:
            scores = ", ".join(sorted(name for name in known if name.startswith("val/")))
            raise UserError(f"callbacks.RegressionGuard watches {self.monitor}, which is not logged; there is {scores}")
        score = float(known[self.monitor])
        if trainer.sanity_checking or not math.isfinite(score):
            return
        self.best = max(self.best, score)
        low = self.best - (1 - self.share) * abs(self.best)
        self.below = self.below + 1 if score < low else 0
        if self.below >= self.evaluations:
            self.below = 0
            self._raise(trainer, pl_module, score)

    def _raise(self, trainer: L.Trainer, module: L.LightningModule, score: float) -> None:
        assert isinstance(module, HasEntropyBonus)
        if self.added >= self.largest:
            return
        self.added = min(self.added + self.step, self.largest)
        module.entropy.strength.add(CAUSE, self.added)
        record_event(
            trainer,
            "regression_guard",
            f"{self.monitor} is {score:.3g} after a best of {self.best:.3g}, for {self.evaluations} evaluations below "
            f"{self.share:.0%} of it: entropy coefficient {module.entropy.coefficient:.3g}",
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "below": self.below, "added": self.added}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.below = float(state_dict["best"]), int(state_dict["below"])
        self.added = float(state_dict["added"])
