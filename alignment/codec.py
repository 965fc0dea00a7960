"""Training state as typed JSON beside a table of tensors: what a checkpoint holds, with no pickle anywhere.

Plain JSON values stand for themselves. Everything else is an object with a single tag, for example
`{"$tuple": [1, 2]}`, `{"$tensor": "state_dict/weight"}`, `{"$float": "nan"}`. Dataclasses become plain dictionaries and
enums their values: the class is chosen by whoever reads them, never by the file. An object of any other kind is an
error that names where in the state it sits.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from alignment.spread import is_spread, local

MAX_DEPTH = 200
"""Nesting a state may have; a deeper one is refused on both sides (a crafted file could exhaust the stack)."""

_NUMPY = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_MAPPINGS = (dict, OrderedDict, AttributeDict)
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_SCALARS = {np.dtype(name).name: np.dtype(name) for name in _NUMPY.split()}


class Encoder:
    """Encodes one state. `encode` returns the JSON tree; `tensors` then maps names to the tensors it refers to.

    Tensors that are the same memory (tied weights) get one name, so they are written once and are one tensor again
    after loading. Raises TypeError, naming the path, for an object JSON and tensors cannot express.

    With `spread`, tensors that are spread over ranks get names too: `parts` maps the path of each to the tensor, and
    `names` are the names in use. Only on rank 0, which holds a part of every tensor, do equal parts of memory tell that
    tensors are the same, so it is rank 0's JSON and names that count.
    """

    def __init__(self, *, spread: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        self.names: list[str] = []
        self._spread = spread
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str = "") -> Any:
        if path.count("/") > MAX_DEPTH:
            raise TypeError(f"the state is nested deeper than {MAX_DEPTH} levels at '{path[:80]}...'")
        if isinstance(value, enum.Enum):
            return self.encode(value.value, path)
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path)}
        if type(value) in _MAPPINGS:
            return self._mapping(value, path)
        if type(value) is list:
            return self._items(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return self._mapping(fields, path)
        return self._tagged(value, path)

    def _tagged(self, value: Any, path: str) -> dict[str, Any]:
        if type(value) in (tuple, torch.Size):
            return {"$tuple" if type(value) is tuple else "$size": self._items(value, path)}
        if type(value) in (set, frozenset):
            items = sorted(value, key=lambda v: (type(v).__name__, repr(v)))
            return {f"${type(value).__name__}": self._items(items, path)}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, np.ndarray):
            return {"$ndarray": self._tensor(_from_numpy(value, path), path)}
        if isinstance(value, np.generic) and value.dtype.name in _SCALARS:
            return {"$numpy": [value.dtype.name, self.encode(value.item(), path)]}
        if type(value) in (bytes, bytearray):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if type(value) is timedelta:
            return {"$timedelta": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, PurePath):
            return {"$path": str(value)}
        raise TypeError(
            f"the checkpoint cannot hold '{path or '(top)'}': {type(value).__module__}.{type(value).__qualname__} is "
            "not a number, string, tensor, list, tuple, set, mapping, dataclass or enum; save its plain state instead"
        )

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.encode(v, f"{path}/{i}") for i, v in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> dict[str, Any]:
        def child(key: Any) -> str:
            return f"{path}/{key}" if path else str(key)

        plain = all(type(k) is str and not k.startswith("$") for k in value)
        if plain:
            return {k: self.encode(v, child(k)) for k, v in value.items()}
        return {"$dict": [[self.encode(k, child(k)), self.encode(v, child(k))] for k, v in value.items()]}

    def _part(self, tensor: Tensor, path: str) -> str:
        part = local(tensor.detach())
        place = (part.device, part.data_ptr(), part.dtype, tuple(tensor.shape))
        key: tuple[Any, ...] = ("spread", *(place if part.numel() else (path,)))
        if key not in self._names:
            self._names[key] = path
            self.names.append(path)
        self.parts[path] = tensor
        return self._names[key]

    def _tensor(self, tensor: Tensor, path: str) -> str:
        if self._spread and is_spread(tensor):
            return self._part(tensor, path)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise TypeError(f"the checkpoint cannot hold '{path}': the tensor is {kind}; save a dense tensor instead")
        wrapped: bool = is_traceable_wrapper_subclass(tensor)
        if wrapped:
            raise TypeError(
                f"the checkpoint cannot hold '{path}': a {type(tensor).__name__} is spread over ranks or packed; "
                "save its plain tensors instead"
            )
        tensor = tensor.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        # An empty tensor has no memory to share, and a conjugate or negative view shares it with another meaning.
        alone = tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg()
        key: tuple[Any, ...] = (path,) if alone else place
        if key not in self._names:
            name = path
            while name in self.tensors:
                name += "'"
            self._names[key] = name
            self.tensors[name] = tensor
        return self._names[key]


def decode(value: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The inverse of `Encoder.encode`. Raises ValueError for a tag or a tensor name that does not exist."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the state is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [decode(v, tensors, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {k: decode(v, tensors, depth + 1) for k, v in value.items()}
    if len(value) != 1 or tag not in _DECODERS:
        raise ValueError(f"unknown entry {tag!r}")
    inner = value[tag]
    if tag in ("$tensor", "$ndarray"):
        if not isinstance(inner, str) or inner not in tensors:
            raise ValueError(f"refers to a tensor {inner!r} that the file does not hold")
        return tensors[inner] if tag == "$tensor" else tensors[inner].numpy()
    if tag in _CONTAINERS:
        if not isinstance(inner, list):
            raise ValueError(f"entry {tag!r} must hold a list")
        inner = [decode(v, tensors, depth + 1) for v in inner]
    try:
        return _DECODERS[tag](inner)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"malformed entry {tag!r}") from error


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> Tensor:
    if array.dtype.name not in _SCALARS:
        raise TypeError(f"the checkpoint cannot hold '{path}': a numpy array of dtype {array.dtype}")
    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))


def _numpy(pair: list[Any]) -> Any:
    name, value = pair
    return _SCALARS[name].type(value)


def _float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise KeyError(text)
    return float(text)


_CONTAINERS = ("$tuple", "$size", "$set", "$frozenset", "$dict", "$timedelta", "$numpy")
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tensor": str,
    "$ndarray": str,
    "$tuple": tuple,
    "$size": torch.Size,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$timedelta": lambda parts: timedelta(*parts),
    "$numpy": _numpy,
    "$float": _float,
    "$dtype": lambda name: _DTYPES[name],
    "$device": torch.device,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$path": Path,
}
