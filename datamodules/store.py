"""Tokenised rows in flat arrays: little memory, quick to load, checked for damage.

Shapes: P groups, N completions, L prompt tokens, C completion tokens (the legend of alignment/batches.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from alignment.batches import Group
from datamodules.rows import RowReport

Arrays = dict[str, np.ndarray]


class DamagedCache(Exception):
    """A cache file is not what was written."""


class GroupStore(Sequence[Group]):
    """Groups as a sequence; a Group is built when it is asked for.

    Args:
        arrays: prompt_ids [L], prompt_lengths [P], completion_ids [C], completion_lengths [N], completions [P],
            index [P], prompt_key [P] (equal prompts, equal key); optional scored [C], weights [N] and `rows.NAME` [N].
        columns: per group of the whole store, its other values.
        order: which groups this sequence shows. None: all.
    """

    def __init__(self, arrays: Arrays, columns: Sequence[Mapping[str, Any]], order: np.ndarray | None = None) -> None:
        self._arrays = arrays
        self._columns = columns
        self._order = np.arange(len(arrays["prompt_lengths"])) if order is None else order
        self._prompt = _starts(arrays["prompt_lengths"])
        self._completion = _starts(arrays["completion_lengths"])
        self._row = _starts(arrays["completions"])

    @classmethod
    def of(cls, groups: Sequence[Group], prompt_keys: Sequence[int]) -> GroupStore:
        """Pack groups. `scored`, weights and named rows must be given by all groups or by none."""
        rows = [c for g in groups for c in g.completions]
        arrays = {
            "prompt_ids": _flat([g.prompt for g in groups]),
            "prompt_lengths": np.array([len(g.prompt) for g in groups], dtype=np.int64),
            "completion_ids": _flat(rows),
            "completion_lengths": np.array([len(c) for c in rows], dtype=np.int64),
            "completions": np.array([len(g.completions) for g in groups], dtype=np.int64),
            "index": np.array([g.index for g in groups], dtype=np.int64),
            "prompt_key": np.array(prompt_keys, dtype=np.int64),
        }
        if any(g.scored is not None for g in groups):
            masks = [s for g in groups for s in (g.scored or [[True] * len(c) for c in g.completions])]
            arrays["scored"] = np.array([bool(v) for mask in masks for v in mask], dtype=np.bool_)
        if any(g.weights is not None for g in groups):
            arrays["weights"] = np.array([w for g in groups for w in (g.weights or ())], dtype=np.float64)
        for name in sorted({name for g in groups for name in g.rows}):
            arrays[f"rows.{name}"] = np.array([v for g in groups for v in g.rows[name]], dtype=np.float64)
        return cls(arrays, [dict(g.columns) for g in groups])

    # ------------------------------------------------------------------ sequence

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, i: int) -> Group: ...
    @overload
    def __getitem__(self, i: slice) -> GroupStore: ...
    def __getitem__(self, i: int | slice) -> Group | GroupStore:
        if isinstance(i, slice):
            return self.select(np.arange(len(self))[i])
        a = self._arrays
        p = int(self._order[i])
        first, last = self._row[p], self._row[p + 1]
        cuts = [(self._completion[n], self._completion[n + 1]) for n in range(first, last)]
        return Group(
            prompt=a["prompt_ids"][self._prompt[p] : self._prompt[p + 1]].tolist(),
            completions=[a["completion_ids"][start:end].tolist() for start, end in cuts],
            scored=[a["scored"][start:end].tolist() for start, end in cuts] if "scored" in a else None,
            weights=a["weights"][first:last].tolist() if "weights" in a else None,
            rows={n.removeprefix("rows."): v[first:last].tolist() for n, v in a.items() if n.startswith("rows.")},
            columns=self._columns[p],
            index=int(a["index"][p]),
        )

    def select(self, positions: np.ndarray) -> GroupStore:
        """The groups at `positions` of this sequence, sharing the arrays."""
        return GroupStore(self._arrays, self._columns, self._order[positions])

    @property
    def row_index(self) -> np.ndarray:
        """[P] positions of the groups in their dataset."""
        return self._arrays["index"][self._order]

    @property
    def prompt_keys(self) -> np.ndarray:
        """[P] digests of the prompts' text."""
        return self._arrays["prompt_key"][self._order]

    def values(self, name: str) -> np.ndarray | None:
        """[P] the named value of each group's first completion; None where the rows have none."""
        found = self._arrays.get(f"rows.{name}")
        return None if found is None else found[self._row[self._order]]

    def columns(self) -> list[Mapping[str, Any]]:
        """P mappings: the groups' other values."""
        return [self._columns[p] for p in self._order.tolist()]

    def tokens(self) -> np.ndarray:
        """[P] tokens the model reads per group: its prompt once, its completions once each."""
        group_of = np.repeat(np.arange(len(self._arrays["completions"])), self._arrays["completions"])
        lengths = self._arrays["completion_lengths"].astype(np.float64)
        total = self._arrays["prompt_lengths"] + np.bincount(group_of, lengths, len(self._arrays["completions"]))
        return total.astype(np.int64)[self._order]

    # ------------------------------------------------------------------ files

    def save(self, path: Path, report: RowReport) -> None:
        """Write the whole store beside its report, in one atomic step."""
        text = json.dumps({"columns": list(self._columns), "report": report.to_dict()})
        arrays = {**self._arrays, "json": np.frombuffer(text.encode(), dtype=np.uint8)}
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        os.close(handle)
        try:
            save_file(arrays, temporary, metadata={"sha256": _digest(arrays)})
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path) -> tuple[GroupStore, RowReport]:
        """Read what `save` wrote. Raises DamagedCache when the file is not whole or not what was written."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise DamagedCache(f"'{path}' is not a whole safetensors file: {error}") from error
        if metadata.get("sha256") != _digest(arrays):
            raise DamagedCache(f"'{path}' has another sha256 than when it was written")
        content = json.loads(arrays.pop("json").tobytes())
        return cls(arrays, content["columns"]), RowReport.from_dict(content["report"])


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    parts = [np.asarray(row, dtype=np.int32) for row in rows]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """[K] lengths -> [K + 1] where each segment begins, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
