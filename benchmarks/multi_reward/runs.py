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
from alignment.soup import soup
from benchmarks.multi_reward import EXPERIMENT
from benchmarks.multi_reward.methods import METHODS, SOUPS, configuration, laid_over
from benchmarks.multi_reward.tasks import TASKS, Task
from benchmarks.online.bench import Run, alignment, working_in

GRID = 4
"""Preferences of the fronts are multiples of 1 / 4."""
CURVES = ("adv/distinct", "completions/mean_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. Args:
    name: of its file of numbers. changes: laid over the method's configuration. task: key of `TASKS`.
    dial: evaluate under a grid of preferences at the end, on held-out and on training prompts.
    """

    name: str
    method: str
    seed: int
    task: str = "triconflict"
    dial: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


def prepare(task: Task, work: Path) -> None:
    """The task's files and the base model, in `work`/NAME-task."""
    folder = _files(work, task)
    if not all((folder / file).exists() for file in task.files):
        with working_in(folder):
            torch.set_num_threads(1)
            task.prepare()


def _files(work: Path, task: Task) -> Path:
    return work / f"{task.config}-task"


def make(jobs: Sequence[Job], work: Path, processes: int) -> dict[str, dict[str, Any]]:
    """Name -> numbers of each job, from `work`/numbers where it is done. Raises RuntimeError when a run failed."""
    for task in {job.task for job in jobs}:
        prepare(TASKS[task], work)
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
        task = TASKS[job.task]
        with working_in(self.work / f"{job.task}-{os.getpid()}"):
            for file in task.files:
                if not Path(file).exists():
                    Path(file).symlink_to(_files(self.work, task) / file)
            found = _soups(job, task) if job.method == SOUPS else _numbers_of(_fit(job, job.name), job)
        path = _numbers(self.work, job.name)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
        partial.replace(path)
        return job.name


def _fit(job: Job, name: str, more: Mapping[str, Any] | None = None) -> Run:
    config = laid_over(configuration(_base(TASKS[job.task]), METHODS[job.method], job.changes), more or {})
    if job.dial:
        turning = {"class_path": "callbacks.PreferenceDial", "init_args": {"steps": GRID}}
        config["trainer"]["callbacks"] = [{"class_path": "callbacks.Checkpoint"}, turning]
    Path(f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return alignment("fit", str(Path(name).resolve()), name, f"--seed_everything={job.seed}", experiment=EXPERIMENT)


def _numbers_of(run: Run, job: Job) -> dict[str, Any]:
    """Mean rewards at every evaluation, in the task's own scale, curves of what is logged while training, cost."""
    task = TASKS[job.task]
    given = job.changes.get("model", {}).get("init_args", {}).get("rewards", {})
    scales = {name: given.get(name, {}).get("args", {}).get("factor", 1.0) for name in task.rewards}
    names = [*CURVES, *(f"adv/{kind}/{name}" for kind in ("zero_std", "corr") for name in task.rewards)]
    return {
        "rewards": {n: [v / scales[n] for _, v in run.curve(f"val/rewards/{n}/mean")] for n in task.rewards},
        "curves": {name: curve for name in names if (curve := run.curve(name))},
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        **({"dial": _points(run, "dial"), "training_dial": _training_dial(run, job)} if job.dial else {}),
    }


def _points(run: Run, name: str) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = json.loads((run.folder / f"{name}.json").read_text(encoding="utf-8"))
    return points


def _training_dial(run: Run, job: Job) -> list[dict[str, Any]]:
    """The same grid on prompts that were trained on, as many as are held out and mixed like them."""
    config, name = str(Path(job.name).resolve()), f"{job.name}-training"
    words = ["--data.test_path=seen.jsonl", f"--ckpt_path={run.checkpoint}"]
    tested = alignment("test", config, name, *words, experiment=EXPERIMENT)
    return _points(tested, "test_dial")


def _soups(job: Job, task: Task) -> dict[str, Any]:
    """One run for each reward; their mean weights at every evaluation, and other mixtures of their ends."""
    saving = {"class_path": "callbacks.Checkpoint", "init_args": {"every_n_train_steps": task.stride, "save_top_k": -1}}
    runs = {}
    for name in task.rewards:
        alone = {other: {"weight": float(other == name)} for other in task.rewards}
        changes = {"model": {"init_args": {"rewards": alone}}, "trainer": {"callbacks": [saving]}}
        runs[name] = _fit(job, f"{job.name}-{name}", changes)
    evaluations = len(next(iter(runs.values())).curve(f"val/rewards/{task.rewards[0]}/mean"))
    shares = [1 / len(task.rewards)] * len(task.rewards)
    rewards: dict[str, list[float]] = {name: [] for name in task.rewards}
    for number in range(1, evaluations + 1):
        for name, value in _taste(job, task, runs, number * task.stride, shares).items():
            rewards[name].append(value)
    points = [
        {"weights": weights, "rewards": _taste(job, task, runs, evaluations * task.stride, list(weights.values()))}
        for weights in grid(task.rewards, GRID)
    ]
    return {
        "rewards": rewards,
        "curves": {},
        "seconds": sum(run.seconds for run in runs.values()),
        "cpu_seconds": sum(run.cpu_seconds for run in runs.values()),
        "dial": points,
    }


def _taste(job: Job, task: Task, runs: Mapping[str, Run], step: int, shares: Sequence[float]) -> dict[str, float]:
    """Mean rewards of a mixture of checkpoints."""
    sources = [next((run.folder / "checkpoints").glob(f"*step={step}.ckpt")) for run in runs.values()]
    soup(sources, "soup", shares, force=True)
    config = configuration(_base(task), METHODS[job.method], {"model": {"init_args": {"policy": {"name": "soup"}}}})
    Path("soup.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    run = alignment("validate", str(Path("soup").resolve()), f"{job.name}-{step}-{shares}", experiment=EXPERIMENT)
    return {name: run.last(f"val/rewards/{name}/mean") for name in task.rewards}


def _base(task: Task) -> dict[str, Any]:
    base: dict[str, Any] = yaml.safe_load(task.yaml.read_text(encoding="utf-8"))
    return base
