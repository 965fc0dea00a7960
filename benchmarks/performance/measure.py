"""Running both sides of a workload in turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alignment import cli
from benchmarks.performance import equality, peers, shares
from benchmarks.performance.turns import Worker, alternate
from benchmarks.performance.workloads import WIDE, WORKLOADS, Workload, specify, write_spec

WARM = 1
"""Steps of each side that are not counted."""
TRIED = (32, 16, 8, 4, 2, 1)
"""Micro-batches of the peer, of which the fastest is taken: from all rows at once down, as long as it helps."""
WORSE = 1.02
"""How many times the least seconds end the search."""
FEW = 2
"""Steps that count where only one side runs."""
VOCABULARIES = (32_000, 152_064, 262_144)
MICRO_BATCH_TOKENS = 2048
LIBRARIES = "import lightning.pytorch.cli, transformers; transformers.AutoModelForCausalLM"
"""What every start of ours imports that is not ours."""

Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where files and the peers' environments are; how many steps of each side count."""

    work: Path
    peers: Path
    pairs: int

    def worker(self, side: str, spec: Mapping[str, Any], version: str = "1.16.0") -> Worker:
        """A process of one side, not yet started."""
        path = write_spec(dict(spec), self.work / "specs" / f"{spec['id']}-{side}.json")
        ours = [sys.executable, "-m", "benchmarks.performance.ours", str(path)]
        theirs = [
            str(peers.python(version, self.peers)),
            str(Path(__file__).with_name("trl_worker.py").resolve()),
            str(path),
        ]
        # ours asks for large pages itself
        env = dict([cli.LARGE_PAGES]) if side == "theirs" and spec["large_pages"] else {}
        return Worker(ours if side == "ours" else theirs, env, log_path=path.with_suffix(".log"))

    def equality(self) -> list[Numbers]:
        """Losses and gradients beside the peer's, before any time counts."""
        folder = self.work / "equality"
        folder.mkdir(parents=True, exist_ok=True)
        return equality.compare(self.peers, equality.STEPS, folder)

    def alone(self, side: str, spec: Mapping[str, Any], version: str = "1.16.0") -> Numbers:
        """A few steps of one side."""
        worker = self.worker(side, spec, version)
        ready = worker.start()
        try:
            steps = [worker.step() for _ in range(spec["steps"])]
        finally:
            worker.stop()
        return {"ready": ready, "steps": steps, "seconds": statistics.median(s["seconds"] for s in steps[WARM:])}

    def tuned(self, work: Workload) -> tuple[dict[str, Any], dict[str, float]]:
        """The peer's best settings for this machine, and what every one that was tried took."""
        rows = work.rows * work.completions
        first, *others = ("bf16-mixed",) if work.gpu else ("fp32", "bf16-mixed")
        tried: dict[str, float] = {}
        settings: dict[str, dict[str, Any]] = {}

        def attempt(dtype: str, size: int, large_pages: bool = True) -> float:
            name = f"{dtype}, micro-batch {size}" + ("" if large_pages else ", small pages")
            settings[name] = {"dtype": dtype, "micro_batch": size, "large_pages": large_pages}
            spec = specify(work, self.work, WARM + FEW, **settings[name])
            tried[name] = self.alone("theirs", spec, work.peer)["seconds"]
            return tried[name]

        for size in TRIED:
            if rows % size == 0 and attempt(first, size) > WORSE * min(tried.values()):
                break
        best = settings[min(tried, key=tried.__getitem__)]["micro_batch"]
        for dtype in others:
            attempt(dtype, best)
        if not work.gpu:
            attempt(settings[min(tried, key=tried.__getitem__)]["dtype"], best, large_pages=False)
        return settings[min(tried, key=tried.__getitem__)], tried

    def workload(self, work: Workload) -> Numbers:
        """Times of both sides step by step, with what was tried for the peer before."""
        best, tried = self.tuned(work)
        steps = WARM + self.pairs
        spec = specify(work, self.work, steps, **best)
        mine = {**spec, "micro_batch": None}
        sides = {"ours": self.worker("ours", mine), "theirs": self.worker("theirs", spec, work.peer)}
        ready = {name: worker.start() for name, worker in sides.items()}
        try:
            found = alternate(list(sides.values()), steps)
        finally:
            for worker in sides.values():
                worker.stop()
        untuned = specify(work, self.work, WARM + FEW, as_it_comes=True, large_pages=False)
        plain = self.alone("theirs", untuned, work.peer)
        return {
            "tried": tried,
            "settings": best,
            "ready": ready,
            "steps": {name: taken[WARM:] for name, taken in zip(sides, found, strict=True)},
            "as_it_comes": plain["seconds"],
        }


# ------------------------------------------------------------------------------------------------- other parts


def _beside(bench: Bench, work: Workload, **changes: Any) -> Numbers:
    """Median seconds and peak bytes of either side, one after the other."""
    found: Numbers = {}
    for side in ("ours", "theirs"):
        spec = specify(work, bench.work, WARM + FEW, **changes, **({"micro_batch": 1} if side == "theirs" else {}))
        taken = bench.alone(side, spec, work.peer)
        found[side] = {"seconds": taken["seconds"], "rss_peak": max(step["rss_peak"] for step in taken["steps"])}
    return found


def memory(bench: Bench) -> Numbers:
    """Peak memory of a process over the vocabulary, and of ours over the batch at a fixed micro-batch."""
    small = replace(WORKLOADS["W4"], id="memory")
    vocabulary = {
        str(size): _beside(bench, replace(small, shape=replace(WIDE, vocabulary=size))) for size in VOCABULARIES
    }
    batch = {}
    for rows in (8, 16, 32, 64):
        work = replace(WORKLOADS["W3"], id="memory", rows=rows)
        spec = specify(work, bench.work, WARM + FEW, ours={"micro_batch_tokens": MICRO_BATCH_TOKENS})
        batch[str(rows)] = max(step["rss_peak"] for step in bench.alone("ours", spec)["steps"])
    return {"vocabulary": vocabulary, "batch": batch, "micro_batch_tokens": MICRO_BATCH_TOKENS}


AXES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "pairs": ("W3", "rows", (2, 4, 8, 16)),
    "prompt": ("W3", "prompt", (64, 128, 256, 512)),
    "completion": ("W3", "completion", (32, 64, 128, 256)),
    "group": ("W6", "completions", (2, 4, 8, 16)),
    "vocabulary": ("W3", "vocabulary", VOCABULARIES),
}
"""What grows -> which workload, which of its sizes, and the sizes."""


def scaling(bench: Bench) -> Numbers:
    """Either side's time and memory over one size at a time, fp32; ours also over processes."""
    found: Numbers = {}
    for axis, (name, size, values) in AXES.items():
        found[axis] = {}
        for value in values:
            work = replace(WORKLOADS[name], id="scaling")
            if size == "vocabulary":
                work = replace(work, shape=replace(work.shape, vocabulary=value))
            else:
                work = replace(work, **{size: value})
            found[axis][str(value)] = _beside(bench, work)
    found["processes"] = {}
    for processes in (1, 2):
        spec = specify(replace(WORKLOADS["W3"], id="scaling"), bench.work, WARM + FEW, threads=2 // processes)
        taken = bench.alone("ours", {**spec, "processes": processes})
        found["processes"][str(processes)] = {"ours": {"seconds": taken["seconds"]}}
    return found


def versions(bench: Bench, numbers: Mapping[str, Numbers]) -> Numbers:
    """Workloads that were measured against one version of the peer -> seconds of a step of the other version with the
    settings that were taken; None where it does not run."""
    found: Numbers = {}
    for name, work in WORKLOADS.items():
        if name not in numbers or work.gpu or work.kind == "ppo":  # only one version has a PPO trainer
            continue
        (other,) = set(peers.VERSIONS) - {work.peer}
        spec = specify(replace(work, id=f"versions-{name}"), bench.work, WARM + 1, **numbers[name]["found"]["settings"])
        try:
            found[name] = {"version": other, "seconds": bench.alone("theirs", spec, other)["seconds"]}
        except RuntimeError as error:
            found[name] = {"version": other, "seconds": None, "why": str(error).strip().splitlines()[-1]}
    return found


def start(bench: Bench, repeats: int = 3) -> Numbers:
    """Seconds from nothing to the first step of DPO and of that step, of ours and of both versions of the peer, in
    turns, with what tuning takes for either side; and those of importing the libraries that ours stands on."""
    work = replace(WORKLOADS["W3"], id="start")
    found: Numbers = {name: [] for name in ("ours", *peers.VERSIONS, "libraries")}
    for _ in range(repeats):
        for name in ("ours", *peers.VERSIONS):
            settings: dict[str, Any] = {"dtype": "bf16-mixed"}
            if name != "ours":
                settings["micro_batch"] = work.rows
            spec = specify(work, bench.work, 1, **settings)
            worker = bench.worker("ours", spec) if name == "ours" else bench.worker("theirs", spec, name)
            ready = worker.start()
            step = worker.step()
            worker.stop()
            found[name].append({"ready": ready["since_start"], "step": step["seconds"]})
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", LIBRARIES], check=True)
        found["libraries"].append({"ready": time.monotonic() - began, "step": 0.0})
    return found


def profile(bench: Bench) -> Numbers:
    """Shares of a step of ours by kind of operator, for every workload of a processor, in bf16-mixed."""
    found: Numbers = {}
    for name, work in WORKLOADS.items():
        if not work.gpu:
            spec = specify(replace(work, id=f"profile-{name}"), bench.work, 2, dtype="bf16-mixed", profile=True)
            step = bench.alone("ours", spec)["steps"][-1]
            found[name] = shares.by_kind(step["operators"], step["profiled"])
    return found


PARTS: Mapping[str, Callable[[Bench], Numbers]] = {
    "memory": memory,
    "scaling": scaling,
    "start": start,
    "profile": profile,
}
