"""One small, fully determined training run, for the trials that interrupt it: kills, signals, damaged checkpoints.

A trial runs in a child process forked from a server that has imported everything once, so that an attempt costs a
second and not ten. What a run did is in its folder: `events.jsonl` (one line per batch and rank) and, when it got to
the end, `final.json` with a digest of weights, moments, schedule and counters.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import torch

import modules
from alignment.batches import Group
from alignment.checkpoint import SafeCheckpointIO, resolve
from alignment.checkpoint_folder import CheckpointError
from alignment.codec import Encoder
from alignment.local_rollout import LocalRollout
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.randomness import generator
from benchmarks.ports import meeting_port
from callbacks import Checkpoint, Signals
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader

ALGORITHMS = ("SFT", "RewardModel", "DPO")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to train. Batches of 4 groups from 22 (the last one short), so an epoch has 6.

    Args:
        algorithm: a class of `modules`, or the import path of another one.
        epochs: how long to train.
        every: optimizer steps between checkpoints.
        validate_every: batches between validations; None validates at the end of each epoch.
        stop_after: signal the run sends itself after that many batches of the whole run, once; 0 for none.
        stop_signal: which one.
        stop_in_rollout: signal the run sends itself while it samples completions for that batch of the whole run; 0 for
            none.
        in_validation: send it in the validation after that batch instead.
        die_at_sync: kill -9 itself at the k-th fsync of the attempt, that is somewhere inside a save; 0 for never.
        max_batches: end the attempt after so many batches of the whole run, as `max_steps` does; -1 for all.
        world_size: processes of the attempt (gloo on this machine).
        optimizer: see OptimConfig.
        lora: train an adapter with dropout instead of the model.
    """

    algorithm: str = "SFT"
    epochs: int = 3
    every: int = 2
    validate_every: int | None = None
    stop_after: int = 0
    stop_signal: int = signal.SIGTERM
    stop_in_rollout: int = 0
    in_validation: bool = False
    die_at_sync: int = 0
    max_batches: int = -1
    world_size: int = 1
    optimizer: Any = "adamw"
    lora: bool = False


class Record(L.Callback):
    """Writes each batch to `events.jsonl` before it can be checkpointed, and sends the planned signal."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.path = folder / "events.jsonl"
        self.polls = 0  # until the signal that is sent inside a rollout

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        batch_number = trainer.fit_loop.total_batch_idx
        event = {"batch": batch_number, "step": trainer.global_step, "epoch": trainer.current_epoch}
        share = {"rank": trainer.global_rank, "world_size": trainer.world_size, "ids": batch.group_index.tolist()}
        self._write({**event, "index": batch_idx, **share})
        self._arm(trainer)
        if self.plan.stop_after and batch_number + 1 == self.plan.stop_after and trainer.is_global_zero:
            os.kill(os.getpid(), self.plan.stop_signal)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            self._write({"validation": trainer.global_step})
            self._arm(trainer)

    def _arm(self, trainer: L.Trainer) -> None:
        here = trainer.fit_loop.total_batch_idx + 1 == self.plan.stop_in_rollout
        if here and trainer.is_global_zero and trainer.validating == self.plan.in_validation:
            self.polls = 2

    def on_poll(self) -> None:
        """Called whenever a local rollout is about to ask whether to stop: at its beginning, then every few tokens."""
        if self.polls == 1:
            os.kill(os.getpid(), self.plan.stop_signal)
        self.polls = max(0, self.polls - 1)

    def _write(self, event: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\n")


def groups(count: int, completions: int) -> list[Group]:
    """Random short groups with ids the tiny tokenizer knows, the same in every process."""
    draw = generator(0, "trial-data", count)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(4, 500, (length,), generator=draw).tolist()

    return [Group(prompt=ids(1, 6), completions=[ids(1, 8) for _ in range(completions)], index=i) for i in range(count)]


def build(plan: Plan) -> tuple[L.LightningModule, StatefulLoader, StatefulLoader]:
    """The module with its training and validation loaders."""
    lora = LoRAConfig(r=4, dropout=0.2) if plan.lora else None
    optim = OptimConfig(lr=1e-3, warmup_steps=3, optimizer=plan.optimizer)
    package, _, name = plan.algorithm.rpartition(".")
    algorithm = getattr(importlib.import_module(package) if package else modules, name)
    module = algorithm(policy=PolicyConfig(name="tiny", lora=lora), micro_batch_tokens=64, optim=optim)
    completions = 1 if plan.algorithm == "SFT" else 2
    share = {"rank": int(os.environ.get("LOCAL_RANK", "0")), "world_size": plan.world_size}
    train = BatchOrder(SampleOrder(22, seed=1), batch_size=4, **share)
    validation = BatchOrder(SampleOrder(6, shuffle=False), batch_size=4, **share)
    return (
        module,
        StatefulLoader(groups(22, completions), train),
        StatefulLoader(groups(6, completions), validation),
    )


def train(plan: Plan, folder: Path) -> L.Trainer:
    """Train, from the newest checkpoint of the folder if it has one."""
    L.seed_everything(7, verbose=False)
    module, loader, validation = build(plan)
    keep = Checkpoint(dirpath=folder / "checkpoints", every_n_train_steps=plan.every)
    record = Record(plan, folder)
    _listen_to_rollouts(record)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=plan.world_size,
        strategy="ddp" if plan.world_size > 1 else "auto",
        max_epochs=plan.epochs,
        max_steps=plan.max_batches,
        val_check_interval=plan.validate_every,
        log_every_n_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[SafeCheckpointIO()],
        callbacks=[record, keep, Signals()],
    )
    try:
        start = str(resolve("last", folder / "checkpoints"))
    except CheckpointError:
        start = None
    trainer.fit(module, loader, validation, ckpt_path=start)
    return trainer


def _listen_to_rollouts(record: Record) -> None:
    poll = LocalRollout._poll

    def heard(rollout: LocalRollout) -> None:
        record.on_poll()
        poll(rollout)

    LocalRollout._poll = heard


def digest(trainer: L.Trainer) -> dict[str, str]:
    """sha256 of weights, of optimizer state, of the schedule, and of everything that counts."""
    module = trainer.lightning_module
    optimizer = trainer.optimizers[0].state_dict()
    parts = {
        "weights": module.state_dict(),
        "moments": optimizer["state"],
        "groups": optimizer["param_groups"],
        "schedule": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "counters": {"step": trainer.global_step, "batches": module.batches_seen, "guard": module.guard.state_dict()},
    }
    return {name: _sha(part) for name, part in parts.items()}


def _sha(state: Any) -> str:
    encoder = Encoder()
    sha = hashlib.sha256(json.dumps(encoder.encode(state)).encode())
    for name, tensor in encoder.tensors.items():
        sha.update(name.encode())
        sha.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# ---------------------------------------------------------------------- in child processes


def attempt(plan: Plan, folder: Path, rank: int = 0, port: int = 0) -> None:
    """One attempt, in a child process: train to the end, or die trying. What it prints goes to `output.txt`."""
    if plan.world_size > 1:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank, "WORLD_SIZE": plan.world_size}
        os.environ.update({"NODE_RANK": "0", **{name: str(value) for name, value in place.items()}})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if plan.die_at_sync:
        _die_at_sync(plan.die_at_sync)
    trainer = train(plan, folder)
    if trainer.received_sigterm:
        sys.exit("Lightning's own handler saw the signal")
    if rank == 0:
        (folder / "final.json").write_text(json.dumps(digest(trainer)))


def _die_at_sync(count: int) -> None:
    sync, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = fsync


def start(plan: Plan, folder: Path) -> BaseProcess:
    """Start an attempt in processes forked from the preloaded server; the process of rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.trials"])
    port = meeting_port()
    ranks = [context.Process(target=attempt, args=(plan, folder, r, port), daemon=True) for r in range(plan.world_size)]
    for process in ranks:
        process.start()
    return ranks[0]


def finish(plan: Plan, folder: Path, attempts: int = 20, timeout: float = 120) -> dict[str, str]:
    """Resume until the run is over; the final digest. Raises RuntimeError if it does not get there."""
    for _ in range(attempts):
        process = start(plan, folder)
        process.join(timeout)
        if process.exitcode == 0:
            return final(folder)
        if process.exitcode is None:
            process.kill()
            break
    raise RuntimeError(f"the run in {folder} did not finish: {(folder / 'output.txt').read_text()[-2000:]}")


def final(folder: Path) -> dict[str, str]:
    result: dict[str, str] = json.loads((folder / "final.json").read_text())
    return result


def batches(folder: Path) -> list[dict[str, Any]]:
    """Every batch as it was last trained on, by the surviving chain of checkpoints; the samples of all ranks together,
    in the order of their positions."""
    path = folder / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    shares = {(line["batch"], line["rank"]): line for line in lines if "batch" in line}
    merged = []
    for number in sorted({batch for batch, _ in shares}):
        line = dict(shares[number, 0])
        world_size = line.pop("world_size")
        parts = [shares[number, rank]["ids"] for rank in range(world_size)]
        ids = [0] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            ids[rank::world_size] = part
        merged.append({**line, "ids": ids})
    return merged


def same_run(folder: Path, reference: Path) -> str:
    """Empty when both runs trained on the same batches and ended bit for bit equal; else what differs."""
    ours, theirs = final(folder), final(reference)
    wrong = [name for name in theirs if ours[name] != theirs[name]]
    if batches(folder) != batches(reference):
        wrong.append("batches")
    return ", ".join(wrong)
