"""Tensors that are spread over ranks, in a checkpoint: each rank writes one file with what it holds, and whoever reads,
on however many ranks, takes from all files what it needs.

A file is a safetensors file. The name of an entry says what it is a part of and where that part begins: `NAME@0,128`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment import distributed
from alignment.spread import cut_like, from_part, is_spread, is_twin, local, place_of
from alignment.tensor_file import DTYPES

FILE = re.compile(r"shard-\d{5}-of-\d{5}\.safetensors")


def file_name(process: int, processes: int) -> str:
    return f"shard-{process:05d}-of-{processes:05d}.safetensors"


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entry -> what this process holds of each spread tensor; nothing of one it holds nothing of, and nothing where its
    rank's first process holds the same."""
    found = {}
    for name, tensor in tensors.items():
        part = local(tensor.detach())
        if part.numel() and (distributed.speaks_for_rank() or not is_twin(tensor)):
            shape, offset = place_of(tensor)
            assert shape == tuple(part.shape), f"{name}: what a process holds is one block"
            found[f"{name}@{','.join(map(str, offset))}"] = part
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    file: Any
    entry: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class SpreadTensor:
    """A tensor of a checkpoint that lies in parts and has not been read.

    Attributes:
        shape: of the whole tensor. dtype: its dtype.
    """

    def __init__(self, name: str, dtype: torch.dtype, parts: Sequence[_Part]) -> None:
        self._name, self._parts, self.dtype = name, parts, dtype
        ends = [[o + n for o, n in zip(part.offset, part.shape, strict=True)] for part in parts]
        self.shape = torch.Size(max(sizes) for sizes in zip(*ends, strict=True))

    def read(self, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        """The block of this shape that begins at `offset`, on the CPU. Raises ValueError where a part of it is not in
        the files."""
        out = torch.empty(tuple(shape), dtype=self.dtype)
        found = 0
        for part in self._parts:
            bounds = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(offset, shape, part.offset, part.shape, strict=True)
            ]
            if all(low < high for low, high in bounds):
                theirs = tuple(slice(low - b, high - b) for (low, high), b in zip(bounds, part.offset, strict=True))
                mine = tuple(slice(low - a, high - a) for (low, high), a in zip(bounds, offset, strict=True))
                out[mine] = part.file.get_slice(part.entry)[theirs]
                found += out[mine].numel()
        if found != out.numel():
            raise ValueError(f"the files lack a part of '{self._name}'")
        return out

    def parts(self) -> Iterator[Tensor]:
        """What each rank wrote of it, one at a time."""
        for part in self._parts:
            yield part.file.get_slice(part.entry)[tuple(slice(0, n) for n in part.shape)]

    def whole(self) -> Tensor:
        return self.read(self.shape, [0] * len(self.shape))


def open_spread(paths: Sequence[Path]) -> dict[str, SpreadTensor]:
    """Name -> tensor, from the files of all ranks. Raises ValueError for a file that is not one of them."""
    parts: dict[str, list[_Part]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            for entry in file.keys():  # noqa: SIM118 (not a mapping)
                name, offset = _named(entry)
                view = file.get_slice(entry)
                shape = tuple(view.get_shape())
                if name == "" or len(shape) != len(offset):
                    raise ValueError(f"{path.name}: '{entry}' is no part of a tensor")
                dtypes[name] = DTYPES[view.get_dtype()]
                parts.setdefault(name, []).append(_Part(file, entry, offset, shape))
        except SafetensorError as error:
            raise ValueError(f"{path.name}: {error}") from error
    return {name: SpreadTensor(name, dtypes[name], found) for name, found in parts.items()}


def _named(entry: str) -> tuple[str, tuple[int, ...]]:
    """The tensor that an entry is a part of and where the part begins; no name for an entry of another form."""
    name, _, places = entry.rpartition("@")
    numbers = places.split(",")
    return (name, tuple(map(int, numbers))) if all(n.isascii() and n.isdecimal() for n in numbers) else ("", ())


def fitted(value: Tensor | SpreadTensor, like: Tensor | None) -> Tensor:
    """A tensor of a checkpoint as this rank holds `like`: spread as that is where it has its shape, else whole."""
    if like is None or not is_spread(like) or is_spread(value) or value.shape != like.shape:
        return value.whole() if isinstance(value, SpreadTensor) else value
    return from_part(value.read(*place_of(like)), like) if isinstance(value, SpreadTensor) else cut_like(value, like)
