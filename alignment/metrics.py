"""Metrics as (sum, count) pairs, so that micro-batches, ranks and logging windows all average the same way.

A training step returns `Metrics`; a `MetricWindow` collects them and reduces all of them in one packed collective.
`MaskedMean` is the torchmetrics form of the same thing, for validation and for users' own modules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

from alignment import distributed

Metrics = dict[str, tuple[Tensor, Tensor]]
"""name -> (sum, count), both 0-dim tensors on any device, without gradient."""


def mean_of(values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count) of a tensor of any shape, over the true entries of `mask` when given.

    Masked values are dropped before the sum, so a NaN behind the mask stays there.
    """
    values = values.detach().double()
    if mask is None:
        return values.sum(), torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
    return torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum().double()


def add_metrics(total: Metrics, part: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add `part` into `total`, key by key."""
    for name, (s, c) in part.items():
        if name in total:
            total[name] = (total[name][0] + s, total[name][1] + c)
        else:
            total[name] = (s, c)


class MetricWindow:
    """Collects `Metrics` between two log lines.

    One `update` is one step's (sum, count). A step whose sum is not finite is left out of the mean and counted; when no
    finite step is left the mean is NaN, never 0. `flush` and `state_dict` are collectives: every rank must call them.
    """

    def __init__(self) -> None:
        self._cells: dict[str, Tensor] = {}

    def update(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add one step. Stays on the device: no synchronisation."""
        for name, (s, c) in metrics.items():
            s, c = s.detach().double(), c.detach().double()
            finite = torch.isfinite(s) & torch.isfinite(c)
            zero = torch.zeros_like(s)
            cell = torch.stack([torch.where(finite, s, zero), torch.where(finite, c, zero), (~finite).double()])
            self._cells[name] = self._cells[name].to(cell.device) + cell if name in self._cells else cell

    def flush(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """name -> mean over the window and all ranks, plus `nonfinite/<name>` for every name with non-finite steps."""
        cells = self.state_dict(device)
        self._cells = {}
        out: dict[str, float] = {}
        for name, (s, c, bad) in cells.items():
            out[name] = s / c if c else float("nan")
            if bad:
                out[f"nonfinite/{name}"] = bad
        return out

    def state_dict(self, device: torch.device | str = "cpu") -> dict[str, list[float]]:
        """name -> [sum, count, non-finite steps] over all ranks: a window cut by a checkpoint is then logged whole."""
        names = distributed.union_of_names(self._cells)
        if not names:
            return {}
        empty = torch.zeros(3, dtype=torch.float64, device=device)
        packed = torch.stack([self._cells.get(name, empty).to(device) for name in names])
        return dict(zip(names, distributed.all_reduce_sum(packed).tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """The sums of all ranks go to the first, so that they count once."""
        mine = state if distributed.rank() == 0 else {}
        self._cells = {name: torch.tensor(cell, dtype=torch.float64) for name, cell in mine.items()}


class MaskedMean(Metric):
    """Mean over the true entries of a mask, kept as a float64 sum and count, so that ranks and batches weigh by count.

    `update(values, mask=None)`: values of any shape. `compute()`: 0-dim float64; NaN when nothing was counted.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        s, c = mean_of(values, mask)
        self.total += s
        self.count += c

    def compute(self) -> Tensor:
        return self.total / self.count if self.count > 0 else torch.full_like(self.total, float("nan"))
