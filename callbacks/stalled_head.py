"""Notices a head that learns nothing, says why, and raises its learning rate where that may help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from alignment.errors import UserError
from alignment.events import record_event
from alignment.schedulable import LR
from alignment.watching import HasHeads

CAUSE = "stalled"
SMALL_WEIGHT = 1e-3
"""Fusion weight from which down hardly anything reaches a head."""


class StalledHead(Callback):
    """A head's gradient below a threshold for some steps of the heads in a row: its learning rate is multiplied, up to
    a cap in total, and the log says what the likely cause is.

    A constant reward is another matter: one that has not differed in any group for so many steps is told, once until it
    differs again, and the rate stays. No rate helps there, and the gradient need not be small, since a KL of the head's
    own remains (`heads.kl`). Such steps count for nothing else.

    The cause is what helps: no rate moves a head whose gradient is 0. Event `stalled_head`. It needs a policy with
    heads (modules.DecoupledPO).

    Args:
        steps: steps of the heads in a row, and again after each raise.
        threshold: gradient norm, before clipping, below which a head has none. Of a step that heads take on the mean of
            several updates, the largest of these counts.
        factor: what the rate is multiplied by.
        cap: largest factor in total. At the cap it is told once more and then no longer.
    """

    def __init__(self, steps: int = 10, threshold: float = 1e-8, factor: float = 1.1, cap: float = 2.0) -> None:
        if steps < 1 or not threshold > 0 or not 1 <= factor <= cap < math.inf:
            raise UserError(
                f"callbacks.StalledHead: steps is {steps}, threshold {threshold}, factor {factor} and cap {cap}; steps "
                "is at least 1, threshold above 0, factor at least 1 and cap at least factor"
            )
        self.steps, self.threshold, self.factor, self.cap = steps, threshold, factor, cap
        self.waited: dict[str, int] = {}
        self.constant: dict[str, int] = {}  # steps in a row without a difference
        self._largest: dict[str, float] = {}
        self._differed: set[str] = set()  # rewards of which that is so since their head's last step
        self._told: set[str] = set()  # that their rate is at the cap

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, HasHeads):
            raise UserError(
                f"callbacks.StalledHead needs a policy with heads (modules.DecoupledPO), not a "
                f"{type(pl_module).__name__}; leave the callback out"
            )
        for name in pl_module.weights:
            pl_module.claim_head(name, CAUSE)

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Mapping[str, float]) -> None:
        assert isinstance(module, HasHeads)
        # In a batch of one head this one steps at each update.
        alone = len(module.alpha) < sum(weight > 0 for weight in module.weights.values())
        for name in module.alpha:
            norm = norms.get(f"head/{name}")
            if norm is None or name in module.frozen:
                continue
            self._largest[name] = max(norm, self._largest.get(name, 0.0))
            if module.flat.get(name) != 1.0:
                self._differed.add(name)
            if alone or module.head_steps.due:
                self._step(trainer, module, name)

    def _step(self, trainer: L.Trainer, module: HasHeads, name: str) -> None:
        """A head has stepped, on what it had since its last step."""
        still = self._largest.pop(name) < self.threshold
        if name not in self._differed:
            self.constant[name] = self.constant.get(name, 0) + 1
            if self.constant[name] == self.steps:
                text = f"constant reward: {name} has not differed in any group for {_steps(self.steps)}"
                advice = f"its head learns nothing of it (adv/zero_std/{name} is 1), its rate stays: mend the reward"
                record_event(trainer, "stalled_head", f"{text}; {advice}")
            return
        self._differed.remove(name)
        self.constant[name] = 0
        self.waited[name] = self.waited.get(name, 0) + 1 if still else 0
        if self.waited[name] >= self.steps:
            self.waited[name] = 0
            self._raise(trainer, module, name)

    def _raise(self, trainer: L.Trainer, module: HasHeads, name: str) -> None:
        if name in self._told:
            return
        before = module.schedulables[f"{LR}/{name}"].factor(CAUSE)
        now = min(before * self.factor, self.cap)
        module.scale_head(name, CAUSE, now)
        if now == before:
            self._told.add(name)
        rate = f"its rate x {now:.3g}" if now > before else f"its rate stays at x {now:.3g}, the cap"
        record_event(
            trainer,
            "stalled_head",
            f"the head of {name} has had no gradient for {_steps(self.steps)}: {rate}; {_cause(module, name)}",
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "waited": dict(self.waited),
            "constant": dict(self.constant),
            "differed": sorted(self._differed),
            "largest": dict(self._largest),
            "told": sorted(self._told),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.waited, self.constant = dict(state_dict["waited"]), dict(state_dict["constant"])
        self._differed = set(state_dict["differed"])
        self._largest, self._told = dict(state_dict["largest"]), set(state_dict["told"])


def _steps(count: int) -> str:
    return f"{count} steps" if count > 1 else "a step"


def _cause(module: HasHeads, name: str) -> str:
    """What most likely takes a head's gradient, and what to do."""
    if module.alpha[name] < SMALL_WEIGHT:
        weight = f"its fusion weight is {module.alpha[name]:.2g} (the reward's weight is {module.weights[name]:g})"
        return f"likely because {weight}: raise the weight or fusion.temperature"
    if (share := module.clipped.get(name, 0.0)) > 0:
        return f"likely because its tokens are clipped ({share:.0%} of all): fewer epochs, a smaller optim.lr"
    return "the reward differs within groups, the fusion weight is not small and no token is clipped"
