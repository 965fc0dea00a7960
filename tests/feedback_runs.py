"""A run that follows rows while they arrive, in a child process of the preloaded server, for tests that kill it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

import lightning as L
import torch

from alignment.checkpoint import SafeCheckpointIO, resolve
from alignment.checkpoint_folder import CheckpointError
from alignment.optim import OptimConfig
from benchmarks import trials
from callbacks import Checkpoint
from datamodules import FollowConfig, PreferenceData
from modules import DPO
from tests.toys import TINY


def attempt(path: Path, folder: Path, die_at_sync: int) -> None:
    """From the newest checkpoint of the folder to the end of the rows, or die at that fsync (0: never)."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if die_at_sync:
        trials._die_at_sync(die_at_sync)
    L.seed_everything(7, verbose=False)
    follow = FollowConfig(quiet=0.0, replay=0.25, memory=6, epoch=3)
    data = PreferenceData(str(path), batch_size=4, val_fraction=0.2, cache_dir=None, follow=follow)
    module = DPO(policy=TINY, optim=OptimConfig(lr=1e-3, schedule="constant"), reference="copy")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[SafeCheckpointIO()],
        callbacks=[
            trials.Record(trials.Plan(algorithm="DPO"), folder),
            Checkpoint(dirpath=folder / "checkpoints", every_n_train_steps=2),
        ],
    )
    try:
        start = str(resolve("last", folder / "checkpoints"))
    except CheckpointError:
        start = None
    trainer.fit(module, datamodule=data, ckpt_path=start)
    final = {"digest": trials.digest(trainer), "stream": data.stream.state_dict()}
    (folder / "final.json").write_text(json.dumps(final))


def start(path: Path, folder: Path, die_at_sync: int = 0) -> BaseProcess:
    """Start an attempt."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.trials"])
    process = context.Process(target=attempt, args=(path, folder, die_at_sync), daemon=True)
    process.start()
    return process
