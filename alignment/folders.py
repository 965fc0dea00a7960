"""Where a run's own files go, whatever logger it has."""

from __future__ import annotations

from pathlib import Path

import lightning as L


def run_folder(trainer: L.Trainer) -> Path:
    """`<save_dir>/<name>/<version>` of the first logger, as ModelCheckpoint places its checkpoints; the trainer's root
    without one. The same on every rank: a collective, so every rank calls it."""
    root = Path(trainer.default_root_dir)
    if trainer.loggers:
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        root = Path(logger.save_dir or root) / str(logger.name) / version
    return Path(trainer.strategy.broadcast(str(root)))
