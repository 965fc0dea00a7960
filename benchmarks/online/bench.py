"""Calling `alignment` in a working folder as a user would, and reading what a run left in its folder."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from alignment import cli, runs
from alignment.checkpoint import resolve

CONFIGS = Path(__file__).resolve().parent
EXPERIMENT = "online"

Curve = list[tuple[int, float]]
"""(batch, value) pairs; batches count from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of `alignment`: its folder, and what it cost.

    Args:
        seconds: wall time. cpu_seconds: of this process, without reward workers.
    """

    folder: Path
    seconds: float
    cpu_seconds: float

    def curve(self, name: str) -> Curve:
        """Every logged value of a metric."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return [(int(line["step"]) + 1, float(line[name])) for line in lines if name in line]

    def last(self, name: str) -> float:
        return self.curve(name)[-1][1]

    def predictions(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "predictions.jsonl")

    @property
    def checkpoint(self) -> Path:
        return resolve("last", self.folder / "checkpoints")


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Within, relative paths and the modules of a user are those of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def alignment(command: str, config: str, name: str, *words: str, experiment: str = EXPERIMENT) -> Run:
    """`alignment COMMAND -c benchmarks/online/CONFIG.yaml WORDS` in the current folder, under a run name; CONFIG may be
    an absolute path. What it prints goes to `output.txt`; one line is shown. Raises RuntimeError when it failed."""
    started, cpu = time.monotonic(), time.process_time()
    argv = [command, "-c", str(CONFIGS / f"{config}.yaml"), *words, f"--trainer.logger.init_args.run_name={name}"]
    with open("output.txt", "a", encoding="utf-8") as output:
        print(f"\n$ alignment {' '.join(argv)}", file=output, flush=True)
        with _printing_to(output):
            status = cli.main(argv)
    if status != 0:
        raise RuntimeError(f"alignment {' '.join(argv)} failed; see {Path('output.txt').resolve()}")
    gc.collect()  # the trainer, its module and its optimizer refer to one another
    folder, _ = next(runs.find_runs(Path.cwd(), experiment, run_name=name))
    run = Run(folder=folder, seconds=time.monotonic() - started, cpu_seconds=time.process_time() - cpu)
    print(f"{command} {name}: {run.seconds:.0f} s", flush=True)
    return run


def per_batch(config: str) -> int:
    """Completions of one batch under a configuration."""
    settings = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text(encoding="utf-8"))
    return int(settings["data"]["init_args"]["batch_size"] * settings["model"]["init_args"].get("completions", 1))


def scaled(curve: Curve, config: str) -> Curve:
    """The curve over completions sampled."""
    size = per_batch(config)
    return [(batch * size, value) for batch, value in curve]


@contextlib.contextmanager
def _printing_to(file: Any) -> Iterator[None]:
    """Within, output and log lines of this process go to a file."""
    handlers = [h for name in (None, "lightning.pytorch", "lightning.fabric") for h in logging.getLogger(name).handlers]
    streams = [h for h in handlers if isinstance(h, logging.StreamHandler)]
    before = [h.setStream(file) for h in streams]
    try:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield
    finally:
        for handler, stream in zip(streams, before, strict=True):
            if stream is not None:
                handler.setStream(stream)


# ---------------------------------------------------------------------------------------------- files


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def machine() -> str:
    """Where the numbers were made. The load says how much of it others had."""
    return (
        f"{_cpu()}, {os.cpu_count()} cores (load average {os.getloadavg()[0]:.1f} at the start), "
        f"{torch.get_num_threads()} torch thread(s); Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# ---------------------------------------------------------------------------------------------- numbers and pictures


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else math.nan:.3f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def draw(path: Path, panels: Mapping[str, Mapping[str, Sequence[Curve]]], x: str) -> None:
    """Curves side by side.

    Args:
        panels: title -> label -> curves of one colour (one for each seed). x: what the horizontal axis counts.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 3), layout="constrained")
    for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for i, (label, curves) in enumerate(lines.items()):
            for k, curve in enumerate(curves):
                axis.plot(*zip(*curve, strict=True), color=f"C{i}", linewidth=1.2, label=label if k == 0 else None)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
