"""Sums over the tokens of one update: over its micro-batches as they pass, then over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alignment import distributed


class Tally:
    """Of one update. What is added stays on the device until `means`."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, tokens: int, **sums: Tensor) -> None:
        """A micro-batch of so many tokens, and sums over them."""
        self._tokens += tokens
        for name, value in sums.items():
            value = value.detach().double().flatten()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def means(self, sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """Name -> mean [size] over the tokens of all ranks, 0 without any. A collective: every rank gives the same
        names and sizes, also one that has added nothing."""
        own = [self._sums.get(name, torch.zeros(size, dtype=torch.float64)).to(device) for name, size in sizes.items()]
        count = torch.tensor([self._tokens], dtype=torch.float64, device=device)
        whole = distributed.all_reduce_sum(torch.cat([count, *own]))
        parts = torch.split_with_sizes(whole[1:] / whole[0].clamp(min=1), list(sizes.values()))
        return dict(zip(sizes, parts, strict=True))
