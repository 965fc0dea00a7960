"""The finite guard: what is remembered about non-finite updates, when to go back, and the dump that explains them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.checkpoint_folder import CheckpointError
from alignment.errors import UserError
from alignment.moments import MomentWatch
from alignment.protocols import PolicyArchive
from alignment.spread_file import SpreadTensor

log = logging.getLogger(__name__)

SETTING = "optimizer setting "
"""Beginning of what is said of one, weight decay or a beta, that is not finite."""
LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""A gradient norm beyond it, whatever the device sums in: squares of its values, second moments, overflow."""


class TrainingDivergedError(UserError):
    """Too many non-finite updates, also after going back to the last good checkpoint. The message names the dump."""


@dataclass(kw_only=True)
class Limits:
    """How many non-finite updates are too many.

    Args:
        in_a_row: as many one after the other are.
        in_window: more than this within `window` are.
        window: updates that are looked back at.
    """

    in_a_row: int = 3
    in_window: int = 5
    window: int = 500

    def __post_init__(self) -> None:
        if self.in_a_row < 1 or self.in_window < 0 or self.window < 1:
            raise UserError(
                f"limits: in_a_row is {self.in_a_row}, in_window {self.in_window} and window {self.window}; the first "
                "and the last are at least 1, in_window at least 0"
            )


class FiniteGuard:
    """Counts non-finite updates, and knows what makes a step unsafe besides its loss and gradient.

    Attributes:
        limits: a callback may set others.
        archive: where to go back to in place of a checkpoint; a callback may set one.
        moments: tells whether the optimizer's state is finite.
    """

    def __init__(self) -> None:
        self.limits = Limits()
        self.archive: PolicyArchive | None = None
        self.moments = MomentWatch()
        self.updates = 0
        self.nonfinite = 0
        self.rolled_back = False
        self._recent: list[int] = []

    def unsafe(self, optimizer: torch.optim.Optimizer) -> str:
        """What would make a step from a finite gradient damage weights, on this rank: the learning rate, another
        setting of the optimizer, or what it remembers; "" for nothing. Reads no tensor while nobody but the optimizer
        has written its state."""
        for group in optimizer.param_groups:
            if not math.isfinite(float(group["lr"])):
                return f"learning rate is {float(group['lr'])}"
            for name, value in group.items():
                numbers = value if isinstance(value, tuple) else (value,)
                if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                    return f"{SETTING}{name} is {value}"
        return self.moments.fault(optimizer)

    def record(self, finite: bool) -> bool:
        """Count one update. True when a limit is passed."""
        self.updates += 1
        if finite:
            return False
        self.nonfinite += 1
        kept = self.limits
        self._recent = [u for u in self._recent if u > self.updates - kept.window] + [self.updates]
        last = list(range(self.updates - kept.in_a_row + 1, self.updates + 1))
        return self._recent[-kept.in_a_row :] == last or len(self._recent) > kept.in_window

    def start_over(self) -> None:
        """Forget the recent failures after going back, which happens once."""
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


# ---------------------------------------------------------------------- the dump


def dump_batch(batch: GroupBatch, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write this process's part of a batch as `<folder>/rank<r>.safetensors`, with `facts` and data columns beside it
    as JSON. Returns the folder. An existing dump is kept: each batch is written once. A disk that refuses is a warning:
    training does not depend on it."""
    target = folder / f"rank{distributed.process()}.safetensors"
    partial = target.with_suffix(".part")
    try:
        if target.exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        own = [f.name for f in fields(batch) if f.name not in ("rows", "tokens", "columns")]
        tensors: dict[str, Tensor] = {name: getattr(batch, name) for name in own}
        tensors |= {f"rows.{k}": v for k, v in batch.rows.items()} | {f"tokens.{k}": v for k, v in batch.tokens.items()}
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, partial)
        text = {"facts": dict(facts), "columns": [dict(c) for c in batch.columns]}
        target.with_suffix(".json").write_text(as_json(text), encoding="utf-8")
        partial.replace(target)  # last: what has this name is whole
    except (OSError, SafetensorError) as error:
        log.warning("the batch cannot be written to %s: %s", folder, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return folder


def as_json(value: Any) -> str:
    """Indented JSON, which has no NaN and no infinity: they are texts in it, and so is what it has no form for."""
    return json.dumps(_strict(value), indent=1, default=str, ensure_ascii=False, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------- going back


def checkpoints(trainer: L.Trainer) -> list[str]:
    """Paths of what this run's checkpoint callbacks have kept, the newest first, the same on every rank."""
    found: set[Path] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            names = {callback.last_model_path, callback.best_model_path, *callback.best_k_models}
            found |= {Path(name) for name in names if name and Path(name).exists()}
    paths = [str(p) for p in sorted(found, key=lambda p: (-p.stat().st_mtime_ns, str(p)))]
    agreed: list[str] = trainer.strategy.broadcast(paths)
    return agreed


def roll_back(module: L.LightningModule, archive: PolicyArchive | None = None) -> str | None:
    """Take the weights back to the newest policy of the archive, or, without one, weights and optimizer state to the
    newest checkpoint. Returns where they are now; None when there is nothing to go to.

    An archive holds no moments: they begin anew. Counters, data order and the schedule's position stay where they are:
    the batches since then are not replayed.
    """
    if archive is not None:
        name = _newest(archive)
        if name is not None:
            archive.restore(module, name)
            for optimizer in module.trainer.optimizers:
                optimizer.state.clear()
            return f"{name} of the archive, which has no moments: the optimizer begins anew"
        log.warning("the archive holds no policy yet: going back to a checkpoint")
    return _to_checkpoint(module)


def _newest(archive: PolicyArchive) -> str | None:
    """The policy kept last of those that every process has; None for none. One whose own weights were not finite has
    kept none then. A collective."""
    kept: list[Any] = distributed.gather_from_processes(archive.names)
    return next((name for name in reversed(kept[0]) if all(name in names for names in kept)), None)


def _to_checkpoint(module: L.LightningModule) -> str | None:
    trainer = module.trainer
    for path in checkpoints(trainer):
        try:
            checkpoint = trainer.strategy.load_checkpoint(path)
        except (CheckpointError, OSError) as error:
            log.warning("the run cannot go back to checkpoint %s: %s", path, error)
            continue
        if "optimizer_states" not in checkpoint:
            log.warning("checkpoint %s holds weights only, so the run cannot go back to it", path)
            continue
        # Updates write nothing else, but what has damaged weights in memory may have been saved.
        if not all(map(_finite, _tensors([checkpoint["state_dict"], checkpoint["optimizer_states"]]))):
            log.warning("checkpoint %s holds values that are not finite, so the run does not go back to it", path)
            continue
        kept = ("lr", "initial_lr", "lr_factor")  # of the run as it is, like the schedule
        rates = [[{k: g[k] for k in kept if k in g} for g in each.param_groups] for each in trainer.optimizers]
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        for optimizer, lrs in zip(trainer.optimizers, rates, strict=True):
            for group, own in zip(optimizer.param_groups, lrs, strict=True):
                group.update(own)
        return path
    return None


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, SpreadTensor):
        yield from state.parts()
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
