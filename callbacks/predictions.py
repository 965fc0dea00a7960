"""Writes what `predict` returns as JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback

from alignment import distributed
from alignment.folders import run_folder


class Predictions(Callback):
    """Collects the rows every `predict_step` returns into one file, in data order, one JSON object a line.

    Each rank writes its own part as it goes, so that an interrupted run leaves what it had; the main process joins the
    parts at the end. A batch may hold several rows of one `index`, the completions of one prompt; what a second batch
    or another rank says of that index (a sampler that pads) is left out. Numbers in float32 have its shortest form.

    Args:
        path: the file, relative to the run's folder unless absolute. An older file of that name is replaced.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        self.path = path
        self._target = Path(path)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._target = run_folder(trainer) / self.path
        self._target.parent.mkdir(parents=True, exist_ok=True)
        if distributed.speaks_for_rank():
            self._part(distributed.rank()).write_text("", encoding="utf-8")

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not distributed.speaks_for_rank():
            return
        with self._part(distributed.rank()).open("a", encoding="utf-8") as file:
            for row, turn in zip(outputs, _turns(outputs), strict=True):
                file.write(json.dumps([turn, _short(row)], ensure_ascii=False) + "\n")

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.barrier("every rank has written its part")
        if distributed.process() == 0:
            self._join()
        trainer.strategy.barrier("the file is complete wherever predict returns")

    def _join(self) -> None:
        parts = [self._part(rank) for rank in range(distributed.world_size())]
        rows = [json.loads(line) for part in parts for line in _lines(part)]
        first: dict[Any, dict[str, Any]] = {}
        for position, (turn, row) in enumerate(rows):
            index = row.get("index", -1)
            first.setdefault((index, turn) if index >= 0 else position, row)
        ordered = sorted(first.values(), key=lambda row: int(row.get("index", -1)))  # stable sort
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered)
        self._target.write_text(text, encoding="utf-8")
        for part in parts:
            part.unlink()
        print(f"predictions: {self._target}", flush=True)

    def _part(self, rank: int) -> Path:
        return self._target.with_name(f"{self._target.name}.rank{rank}")


def _turns(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each row, how many rows of the same index stand before it."""
    seen: Counter[Any] = Counter()
    turns = []
    for row in rows:
        index = row.get("index")
        turns.append(seen[index])
        seen[index] += 1
    return turns


def _short(value: Any) -> Any:
    """Numbers that came from float32 as that type writes them: 0.1, not 0.10000000149011612. At any depth."""
    if isinstance(value, Mapping):
        return {key: _short(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def _lines(path: Path) -> list[str]:
    # Not splitlines(): JSON text may hold other line separators (U+2028) as they are.
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
