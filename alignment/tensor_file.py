"""Writing and reading one safetensors file. The writer streams, hashes as it goes and flushes to the disk.

The format: 8 bytes little-endian header length, a JSON header (dtype, shape, offsets of each tensor), the raw bytes.
The official reader does the reading; the writer is ours because the official one first holds a copy of every tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

MAX_HEADER = 100_000_000
"""Bytes of header the official reader accepts; a longer one is refused before anything is allocated."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""The format's name of a dtype -> the dtype."""


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """The header's bytes and the order of the data. Raises TypeError for a tensor whose dtype the format lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"the checkpoint cannot hold '{name}': safetensors has no dtype {tensor.dtype}")
    # Widest elements first keeps every tensor aligned to its own element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), order


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write and fsync. Returns (bytes, sha256). At most one tensor is copied to the host at a time."""
    head, order = header(tensors)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for part in (len(head).to_bytes(8, "little"), head):
            file.write(part)
            digest.update(part)
        for name in order:
            data = _bytes(tensors[name])
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor, on the CPU. Raises ValueError when the file is not a safetensors file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise ValueError(f"{path.name}: a header of {length} bytes in a file of {size}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _bytes(tensor: Tensor) -> memoryview[int]:
    # as_subclass: a Parameter of bitsandbytes is a Tensor subclass with its own idea of `.cpu()`.
    plain = tensor.as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
