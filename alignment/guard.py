"""The finite guard: what is remembered about non-finite updates, when to stop, and the dump that explains them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.errors import UserError

log = logging.getLogger(__name__)

IN_A_ROW = 3
WINDOW = 500
IN_WINDOW = 5


class TrainingDivergedError(UserError):
    """Too many non-finite updates, also after going back to the last good checkpoint. The message names the dump."""


class FiniteGuard:
    """Counts non-finite updates. The limit is three in a row or more than five among the last 500 updates."""

    def __init__(self) -> None:
        self.updates = 0
        self.nonfinite = 0
        self.rolled_back = False
        self._recent: list[int] = []

    def record(self, finite: bool) -> bool:
        """Count one update. True when the limit is passed."""
        self.updates += 1
        if finite:
            return False
        self.nonfinite += 1
        self._recent = [u for u in self._recent if u > self.updates - WINDOW] + [self.updates]
        in_a_row = self._recent[-IN_A_ROW:] == list(range(self.updates - IN_A_ROW + 1, self.updates + 1))
        return in_a_row or len(self._recent) > IN_WINDOW

    def start_over(self) -> None:
        """Forget the recent failures after going back to a checkpoint, which happens once."""
        self.rolled_back = True
        self._recent = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "nonfinite": self.nonfinite,
            "rolled_back": self.rolled_back,
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = int(state["updates"])
        self.nonfinite = int(state["nonfinite"])
        self.rolled_back = bool(state["rolled_back"])
        self._recent = [int(u) for u in state["recent"]]


def dump_batch(batch: GroupBatch, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write this rank's part of a batch as `<folder>/rank<r>.safetensors`, with `facts` and the data columns beside it
    as JSON. Returns the folder. An existing dump is kept: each batch is written once."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"rank{distributed.rank()}.safetensors"
    if target.exists():
        return folder
    own = [f.name for f in fields(batch) if f.name not in ("rows", "tokens", "columns")]
    tensors: dict[str, Tensor] = {name: getattr(batch, name) for name in own}
    tensors |= {f"rows.{k}": v for k, v in batch.rows.items()} | {f"tokens.{k}": v for k, v in batch.tokens.items()}
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, target)
    text = {"facts": dict(facts), "columns": [dict(c) for c in batch.columns]}
    target.with_suffix(".json").write_text(json.dumps(text, indent=1, default=str, ensure_ascii=False))
    return folder


def newest_checkpoint(trainer: L.Trainer) -> str | None:
    """Path of the checkpoint written last by this run's checkpoint callbacks, the same on every rank; None without one.
    Every checkpoint is good: the guard lets no non-finite update reach the weights."""
    found: list[Path] = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            names = {callback.last_model_path, callback.best_model_path, *callback.best_k_models}
            found += [Path(name) for name in names if name and Path(name).exists()]
    newest = max(found, key=lambda p: p.stat().st_mtime_ns, default=None)
    path: str | None = trainer.strategy.broadcast(None if newest is None else str(newest))
    return path


def roll_back(module: L.LightningModule) -> str | None:
    """Load weights and optimizer state of the newest checkpoint; None when there is none to load.

    Counters, data order and the schedule's position stay where they are: the batches since then are not replayed.
    """
    trainer = module.trainer
    path = newest_checkpoint(trainer)
    if path is None:
        return None
    kept = ("lr", "initial_lr", "lr_factor")  # of the run as it is, like the schedule
    rates = [[{k: g[k] for k in kept if k in g} for g in optimizer.param_groups] for optimizer in trainer.optimizers]
    checkpoint = trainer.strategy.load_checkpoint(path)
    if "optimizer_states" not in checkpoint:
        log.warning("checkpoint %s holds weights only, so the run cannot go back to it", path)
        return None
    trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    for optimizer, lrs in zip(trainer.optimizers, rates, strict=True):
        for group, own in zip(optimizer.param_groups, lrs, strict=True):
            group.update(own)
    return path
