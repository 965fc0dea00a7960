"""Making runs: each by the ordinary command line, several processes side by side, a finished one never twice."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from alignment.dial import grid
from alignment.export import export
from alignment.soup import soup
from benchmarks.multi_reward import triconflict
from benchmarks.multi_reward.methods import METHODS, SOUPS, configuration, laid_over
from benchmarks.multi_reward.triconflict import REWARDS
from benchmarks.online.bench import Run, alignment, working_in

HERE = Path(__file__).resolve().parent
EXPERIMENT = "multi_reward"
STRIDE = 20
"""Optimizer steps between two evaluations: 10 batches, each used twice."""
GRID = 4
"""Preferences of the fronts are multiples of 1 / 4."""
CURVES = ("adv/distinct", "completions/mean_length", *(f"adv/{k}/{n}" for k in ("zero_std", "corr") for n in REWARDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. Args:
    name: of its file of numbers. changes: laid over the method's configuration.
    """

    name: str
    method: str
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)


def prepare(work: Path) -> None:
    """The task's files and the base model, in `work`/task."""
    task = work / "task"
    if (task / "base").is_dir():
        return
    with working_in(task):
        torch.set_num_threads(1)
        triconflict.write_files(Path())
        triconflict.write_model(Path("start"))
        fit = alignment("fit", str(HERE / "sft"), "sft", experiment=EXPERIMENT)
        export(fit.checkpoint, Path("base"), force=True)


def make(jobs: Sequence[Job], work: Path, processes: int) -> dict[str, dict[str, Any]]:
    """Name -> numbers of each job, from `work`/numbers where it is done. Raises RuntimeError when a run failed."""
    prepare(work)
    (work / "numbers").mkdir(parents=True, exist_ok=True)
    missing = [job for job in jobs if not _numbers(work, job.name).exists()]
    if missing:
        context = multiprocessing.get_context("spawn")
        with context.Pool(min(processes, len(missing))) as pool:
            for done, name in enumerate(pool.imap_unordered(_Make(work.resolve()), missing), start=1):
                print(f"{done} of {len(missing)}: {name}", flush=True)
    return {job.name: json.loads(_numbers(work, job.name).read_text(encoding="utf-8")) for job in jobs}


def _numbers(work: Path, name: str) -> Path:
    return work / "numbers" / f"{name}.json"


@dataclass(frozen=True, slots=True)
class _Make:
    """A job in a worker; its name."""

    work: Path

    def __call__(self, job: Job) -> str:
        torch.set_num_threads(1)  # the matrices are too small to share
        with working_in(self.work / f"process-{os.getpid()}"):
            for file in ("base", "rl.jsonl", "held_out.jsonl"):
                if not Path(file).exists():
                    Path(file).symlink_to(self.work / "task" / file)
            found = _soups(job) if job.method == SOUPS else _numbers_of(_fit(job, job.name))
        path = _numbers(self.work, job.name)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
        partial.replace(path)
        return job.name


def _fit(job: Job, name: str, more: Mapping[str, Any] | None = None) -> Run:
    config = laid_over(configuration(_base(), METHODS[job.method], job.changes), more or {})
    Path(f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return alignment("fit", str(Path(name).resolve()), name, f"--seed_everything={job.seed}", experiment=EXPERIMENT)


def _numbers_of(run: Run) -> dict[str, Any]:
    """Mean rewards at every evaluation, curves of what is logged while training, cost."""
    dial = run.folder / "dial.json"
    return {
        "rewards": {name: [value for _, value in run.curve(f"val/rewards/{name}/mean")] for name in REWARDS},
        "curves": {name: curve for name in CURVES if (curve := run.curve(name))},
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "dial": json.loads(dial.read_text(encoding="utf-8")) if dial.exists() else None,
    }


def _soups(job: Job) -> dict[str, Any]:
    """One run for each reward; their mean weights at every evaluation, and other mixtures of their ends."""
    saving = {"class_path": "callbacks.Checkpoint", "init_args": {"every_n_train_steps": STRIDE, "save_top_k": -1}}
    runs = {}
    for name in REWARDS:
        alone = {other: {"weight": float(other == name)} for other in REWARDS}
        changes = {"model": {"init_args": {"rewards": alone}}, "trainer": {"callbacks": [saving]}}
        runs[name] = _fit(job, f"{job.name}-{name}", changes)
    steps = [step for step, _ in next(iter(runs.values())).curve("val/rewards/accuracy/mean")]
    shares = [1 / len(REWARDS)] * len(REWARDS)
    rewards: dict[str, list[float]] = {name: [] for name in REWARDS}
    for step in steps:
        for name, value in _taste(job, runs, 2 * step, shares).items():
            rewards[name].append(value)
    points = [
        {"weights": weights, "rewards": _taste(job, runs, 2 * steps[-1], list(weights.values()))}
        for weights in grid(REWARDS, GRID)
    ]
    return {
        "rewards": rewards,
        "curves": {},
        "seconds": sum(run.seconds for run in runs.values()),
        "cpu_seconds": sum(run.cpu_seconds for run in runs.values()),
        "dial": points,
    }


def _taste(job: Job, runs: Mapping[str, Run], step: int, shares: Sequence[float]) -> dict[str, float]:
    """Mean rewards of a mixture of checkpoints."""
    sources = [next((run.folder / "checkpoints").glob(f"*step={step}.ckpt")) for run in runs.values()]
    soup(sources, "soup", shares, force=True)
    config = configuration(_base(), METHODS[job.method], {"model": {"init_args": {"policy": {"name": "soup"}}}})
    Path("soup.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    run = alignment("validate", str(Path("soup").resolve()), f"{job.name}-{step}-{shares}", experiment=EXPERIMENT)
    return {name: run.last(f"val/rewards/{name}/mean") for name in REWARDS}


def _base() -> dict[str, Any]:
    base: dict[str, Any] = yaml.safe_load((HERE / "base.yaml").read_text(encoding="utf-8"))
    return base
