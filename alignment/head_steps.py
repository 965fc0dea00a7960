"""When heads step: less often than the trunk, with an optimizer that both share.

    step of the trunk        1      2      3              4      5      6
    heads, `mean`            -      -      (g1+g2+g3)/3   -      -      (g4+g5+g6)/3
    heads, `last`            -      -      g3             -      -      g6
    heads, `rate`            g1/3   g2/3   g3/3           ...    (the factor is the learning rate's)

In between a head's gradient is None, so that the optimizer does not touch its weights or moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from alignment.head_config import Between


class HeadSteps:
    """Turns the heads' gradients of each update into what they step on.

    Args:
        every: steps of the trunk to a step of the heads. between: see HeadsConfig.
    """

    def __init__(self, every: int, between: Between) -> None:
        self.every, self.between = every, between
        self.phase = 0
        self._gathered: dict[str, Tensor] = {}

    @property
    def rate(self) -> float:
        """Factor on the heads' learning rate."""
        return 1 / self.every if self.between == "rate" else 1.0

    @property
    def due(self) -> bool:
        """Whether heads step at the next update that is taken."""
        return self.between == "rate" or self.phase + 1 == self.every

    def take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Of one update that is going to step: name -> parameter of every head, with its gradient or without one."""
        if self.between == "rate":
            return
        self.phase = (self.phase + 1) % self.every
        for name, p in parameters.items():
            if self.between == "mean" and p.grad is not None:
                before = self._gathered.get(name)
                self._gathered[name] = p.grad if before is None else before.to(p.device).add_(p.grad)
            if self.phase:
                p.grad = None
            elif self.between == "mean" and (total := self._gathered.pop(name, None)) is not None:
                p.grad = total.to(p.device).div_(self.every)

    def state_dict(self) -> dict[str, Any]:
        return {"phase": self.phase, "gathered": {name: total.clone() for name, total in self._gathered.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.phase = int(state["phase"]) % self.every
        self._gathered = dict(state["gathered"])
