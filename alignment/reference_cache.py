"""Reference log-probs on disk: computed once for a data set, found again by content.

One safetensors file per (model, tokenizer, limits, rows). Its rows are keyed by what was scored (prompt, completion and
mask), so shuffling, regrouping or cutting batches never moves a value to another row. The file's header repeats the key
and holds a checksum of the data; a file that does not match them is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.chat import tokenizer_digest
from alignment.errors import UserError
from alignment.whole_file import sync

__all__ = [
    "DamagedCacheError",
    "LogpTable",
    "cache_key",
    "cache_path",
    "read_table",
    "row_keys",
    "tokenizer_digest",
    "write_table",
]

FORMAT = "reference-logps-1"


class DamagedCacheError(ValueError):
    """The file is not what its name says: cut short, altered or of another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogpTable:
    """Log-probs of K distinct rows with T tokens in total.

    Args:
        keys: [K] int64, ascending.
        lengths: [K] int64 tokens of each row.
        logps: [T] float32, the rows in the order of `keys`, 0 at unscored tokens.
        entropies: [T] float32 likewise, nats of the distribution each token was drawn from. None: not computed.
    """

    keys: Tensor
    lengths: Tensor
    logps: Tensor
    entropies: Tensor | None = None

    @classmethod
    def from_rows(cls, rows: Mapping[int, Tensor]) -> LogpTable:
        """From row key -> [1, length] log-probs, or [2, length] log-probs and entropies: the same for all rows."""
        keys = sorted(rows)
        values = [rows[k].to("cpu", torch.float32) for k in keys]
        flat = torch.cat(values, dim=1) if values else torch.zeros(1, 0)
        return cls(
            keys=torch.tensor(keys, dtype=torch.int64),
            lengths=torch.tensor([v.shape[1] for v in values], dtype=torch.int64),
            logps=flat[0].contiguous(),
            entropies=flat[1].contiguous() if len(flat) == 2 else None,
        )

    def lookup(self, batch: GroupBatch) -> Tensor:
        """[C] float32 log-probs on the batch's device.

        Raises:
            UserError: a row that was not there when the table was computed; names its position in the data.
        """
        return self._picked(self.logps, batch)

    def lookup_entropies(self, batch: GroupBatch) -> Tensor:
        """[C] float32 entropies on the batch's device. Raises UserError as `lookup`, and where there are none."""
        if self.entropies is None:
            raise UserError("the cached reference has log-probs and no entropies; precompute both, or use copy")
        return self._picked(self.entropies, batch)

    def _picked(self, values: Tensor, batch: GroupBatch) -> Tensor:
        keys = torch.tensor(row_keys(batch), dtype=torch.int64)
        at = torch.searchsorted(self.keys, keys).clamp(max=max(len(self.keys) - 1, 0))
        known = self.keys[at] == keys if len(self.keys) else torch.zeros(len(keys), dtype=torch.bool)
        if not bool(known.all()):
            row = int((~known).nonzero()[0])
            index = int(batch.group_index[batch.group_of[row]])
            raise UserError(f"row {index} is not among the cached reference log-probs; precompute them for this data")
        starts = (self.lengths.cumsum(0) - self.lengths)[at]
        ends = starts + self.lengths[at]
        parts = [values[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return (torch.cat(parts) if parts else torch.zeros(0)).to(batch.device)


def row_keys(batch: GroupBatch) -> list[int]:
    """N 63-bit digests of each row's prompt, completion and scored mask: all that its log-probs depend on."""
    lengths = batch.completion_lengths.tolist()
    prompts = [p.numpy().tobytes() for p in torch.split(batch.prompt_ids.cpu(), batch.prompt_lengths.tolist())]
    completions = torch.split(batch.completion_ids.cpu(), lengths)
    scored = torch.split(batch.scored.cpu(), lengths)
    keys = []
    for group, ids, mask in zip(batch.group_of.tolist(), completions, scored, strict=True):
        digest = hashlib.blake2b(len(prompts[group]).to_bytes(8, "little"), digest_size=8)
        digest.update(prompts[group])
        digest.update(ids.numpy().tobytes())
        digest.update(mask.numpy().tobytes())
        keys.append(int.from_bytes(digest.digest(), "little") >> 1)
    return keys


def cache_key(model: str, parts: Mapping[str, Any], keys: list[int]) -> str:
    """File key from the model's digest, the caller's parts (tokenizer digest, token limits, ...) and the rows."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([FORMAT, model, dict(parts)], sort_keys=True, default=str).encode())
    digest.update(torch.tensor(sorted(keys), dtype=torch.int64).numpy().tobytes())
    return digest.hexdigest()


def cache_path(folder: Path, key: str) -> Path:
    """Where the table of a key lies."""
    return folder / f"reference-{key}.safetensors"


def write_table(path: Path, key: str, table: LogpTable) -> None:
    """Write beside the final place, flush to the disk, rename: a reader sees nothing or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"keys": table.keys, "lengths": table.lengths, "logps": table.logps}
    if table.entropies is not None:
        tensors["entropies"] = table.entropies
    partial = path.with_suffix(f".partial-{os.getpid()}")
    save_file(tensors, partial, metadata={"format": FORMAT, "key": key, "sha256": _checksum(tensors)})
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def read_table(path: Path, key: str) -> LogpTable:
    """Raises DamagedCacheError when the file is not a complete, unaltered table of `key`."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            names = {"keys", "lengths", "logps"} | ({"entropies"} & set(file.keys()))
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise DamagedCacheError(str(error)) from error
    if (header.get("format"), header.get("key")) != (FORMAT, key):
        raise DamagedCacheError("its header belongs to another cache")
    if header.get("sha256") != _checksum(tensors):
        raise DamagedCacheError("its data does not match its checksum")
    return LogpTable(**tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()
