"""Whether what an optimizer remembers is finite, without reading it at each step.

A gradient whose norm is at most `guard.LARGEST_NORM` cannot make a moment non-finite: the norm is the root of the sum
of all squares. So moments go wrong only when something else writes them, which their tensors' version counters tell on
the host: then, and when they are new (a checkpoint was loaded), they are read before the next step. What no counter
sees, memory that fails, a read at every so many steps finds; a single step is enough for it to reach a weight, where
the loss shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from alignment.spread import local


class MomentWatch:
    """Watches one optimizer's state.

    Attributes:
        every: steps between two reads that nothing gave reason for; 0 for none.
    """

    def __init__(self) -> None:
        self.every = 0
        self._seen: list[tuple[int, int]] | None = None
        self._steps = 0  # since the last read

    def fault(self, optimizer: torch.optim.Optimizer) -> str:
        """What of the state is not finite, "" for nothing; see the module for when it is looked at. Call it before a
        step."""
        versions = _versions(optimizer)
        due = self.every > 0 and self._steps >= self.every
        if versions == self._seen and not due:
            return ""
        found = nonfinite_state(optimizer)
        if found is None:
            self._seen, self._steps = versions, 0
            return ""
        return f"the optimizer's {found[1]} is not finite"

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Call it after each step."""
        self._seen = _versions(optimizer)
        self._steps += 1

    def forget(self) -> None:
        """The state is another one: read it before the next step."""
        self._seen = None


def nonfinite_state(optimizer: torch.optim.Optimizer) -> tuple[int, str] | None:
    """(number of the parameter among the trained ones, name) of the first value that is not finite. One
    synchronisation."""
    named = list(_values(optimizer))
    if not named:
        return None
    device = optimizer.param_groups[0]["params"][0].device
    ends = torch.stack([_ends(value).to(device) for _, _, value in named]).isfinite().all(dim=1).tolist()
    for (place, name, _), finite in zip(named, ends, strict=True):
        if not finite:
            return place, name
    return None


def _ends(value: Tensor) -> Tensor:
    """[2] smallest and largest value, NaN where there is one."""
    value = local(value.detach())
    if not value.numel():
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack(torch.aminmax(value if value.dtype == torch.float64 else value.float())).double()


def _values(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    """(number of the parameter among the trained ones, name, value) of what is not a whole number."""
    place = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield place, str(name), value
            place += 1


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    return [(id(value), value._version) for _, _, value in _values(optimizer)]
