"""The key-value cache of a rollout: allocated ahead, written in place, and rearranged as a whole now and then.

transformers' own dynamic cache concatenates at every step, which copies it at every step; its static one cannot drop
rows. This one is a rectangle [rows, heads, columns, size] per layer in which a decode step fills the next columns, and
which `rearrange` copies into another rectangle when rows finish or the room is used up.

Legend: R rows, T columns in use, h key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


class KVCache(Cache):
    """Keys and values of every layer.

    The first forward pass stores what it is given; later ones write into the room that `rearrange` made. After each
    pass the caller says with `advance` how many columns it added.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.columns = 0

    @property
    def dtype(self) -> torch.dtype:
        return self._any_keys.dtype

    @property
    def heads(self) -> int:
        """Key-value heads of a layer."""
        return self._any_keys.shape[1]

    @property
    def room(self) -> int:
        """Free columns."""
        return self._any_keys.shape[2] - self.columns

    @property
    def elements_per_token(self) -> int:
        """Numbers kept for one token, over all layers."""
        return sum(x.shape[1] * x.shape[3] for pair in self._layers.values() for x in pair)

    @property
    def _any_keys(self) -> Tensor:
        return next(iter(self._layers.values()))[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: adds its new keys and values [R, h, q, d] and returns views of all of them,
        [R, h, T + q, d]."""
        if self.columns == 0:
            self._layers[layer_idx] = key_states, value_states
            return key_states, value_states
        keys, values = self._layers[layer_idx]
        end = self.columns + key_states.shape[2]
        assert end <= keys.shape[2], "no room left: rearrange the cache first"
        keys[:, :, self.columns : end] = key_states
        values[:, :, self.columns : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, columns: int) -> None:
        """End of a forward pass that added this many columns."""
        self.columns += columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def rearrange(self, row: Tensor, column: Tensor, room: int) -> None:
        """Replace the contents: cell [r, t] becomes what was in cell (row[r, t], column[r, t]), for every layer.

        Args:
            row, column: [R', T'] int64, both within the cells in use; a cell that no one may see still needs a valid
                source, because 0 times a NaN is a NaN.
            room: free columns to allocate behind the T' in use.

        Layer by layer, so that only one layer exists twice at any time.
        """
        for index, pair in self._layers.items():
            keys, values = (_gathered(old, row, column, room) for old in pair)
            self._layers[index] = keys, values
        self.columns = column.shape[1]

    @classmethod
    def stack(cls, parts: Sequence[KVCache]) -> KVCache:
        """Caches with equal columns and no room, one below the other. Takes the tensors out of `parts`."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        whole.columns = parts[0].columns
        for index in list(parts[0]._layers):
            pairs = [part._layers.pop(index) for part in parts]
            whole._layers[index] = torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs])
        return whole


def _gathered(old: Tensor, row: Tensor, column: Tensor, room: int) -> Tensor:
    rows, columns = row.shape
    new = old.new_empty(rows, old.shape[1], columns + room, old.shape[3])
    new[:, :, :columns] = old.transpose(1, 2)[row, column].transpose(1, 2)
    return new
