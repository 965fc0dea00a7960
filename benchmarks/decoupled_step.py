"""`python -m benchmarks.decoupled_step --model FOLDER`: what a step of DecoupledPO costs beside one of GRPO.

Both train on the same questions with three rewards by the ordinary command line, in two processes that take turns: one
batch of the one, one of the other, never two at once. A step is rollout, rewards, reference, backward and update. The
first of each is left out. Writes reports/decoupled_step.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from alignment import cli
from benchmarks.online.bench import machine, table, working_in

STEPS = 5
REPORT = Path("reports/decoupled_step.md")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("GRPO", {"kl": {"coefficient": 0.02}}),
    "DecoupledPO": ("DecoupledPO", {}),
    "DecoupledPO, isolation": ("DecoupledPO", {"isolation": {"mode": "project"}}),
}
CONFIG = """
seed_everything: 0
model:
  class_path: modules.GRPO
  init_args:
    rewards:
      right: {reward: alignment.rewards.support.right, in_process: true}
      warm: {reward: alignment.rewards.support.warmth, in_process: true}
      short: {reward: LengthWithin, args: {maximum: 48}, in_process: true}
    completions: 8
    sampling: {max_tokens: 48, min_tokens: 48}
    optim: {lr: 1.0e-5}
data:
  class_path: datamodules.PromptData
  init_args: {path: "world:support", batch_size: 4, max_rows: 64}
trainer:
  accelerator: cpu
  max_epochs: 1
  limit_val_batches: 0
  num_sanity_val_steps: 0
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: benchmarks.decoupled_step.Turns
"""


class Place:
    """Of this process in the order: its turn, the next one's, and where times go."""

    mine: Event
    following: Event
    times: Any


class Turns(Callback):
    """A batch when it is this process's turn; then the next one's."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        Place.mine.wait()
        Place.mine.clear()
        self._begun = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        Place.times.append(time.perf_counter() - self._begun)
        Place.following.set()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Place.following.set()


def _train(method: str, model: Path, lora: bool, work: Path, mine: Event, following: Event, times: Any) -> None:
    from benchmarks.decoupled_step import Place  # the callback's own: this file is also __main__ of the process

    Place.mine, Place.following, Place.times = mine, following, times
    module, settings = METHODS[method]
    config = yaml.safe_load(CONFIG)
    config["model"]["class_path"] = f"modules.{module}"
    policy = {"name": str(model), **({"lora": {"r": 16}} if lora else {})}
    config["model"]["init_args"] |= {"policy": policy, **settings}
    config["trainer"]["max_steps"] = STEPS + 1
    with working_in(work / method.replace(", ", "-")):
        Path("config.yaml").write_text(yaml.safe_dump(config))
        sys.exit(cli.main(["fit", "-c", "config.yaml"]))


def measure(model: Path, lora: bool, work: Path) -> dict[str, list[float]]:
    """Method -> seconds of each step but the first. Raises RuntimeError when one did not end well."""
    context = multiprocessing.get_context("spawn")
    turns = [context.Event() for _ in METHODS]
    with context.Manager() as manager:
        times = {method: manager.list() for method in METHODS}
        processes = [
            context.Process(target=_train, args=(m, model, lora, work, turns[i], turns[(i + 1) % len(turns)], times[m]))
            for i, m in enumerate(METHODS)
        ]
        for process in processes:
            process.start()
        turns[0].set()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}")
        return {method: list(found)[1:] for method, found in times.items()}


def lines_of(found: dict[str, list[float]]) -> list[str]:
    """Each step beside GRPO's of the same round."""
    rows = []
    for method, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, found["GRPO"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([method, f"{statistics.median(seconds):.2f}", spread])
    return table(["method", "seconds a step, median", "against GRPO, median (smallest to largest)"], rows)


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoupled_step", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--work", type=Path, default=Path(".cache/decoupled_step"))
    parser.add_argument("--out", type=Path, default=REPORT)
    options = parser.parse_args(argv)
    lines = [
        "# What a step of DecoupledPO costs",
        "",
        f"`python -m benchmarks.decoupled_step` on {machine()}.",
        f"SmolLM2, fp32; 4 prompts of 8 completions of 48 tokens, three rewards; {STEPS} steps of each method, taking",
        "turns. A step is rollout, rewards, reference and update.",
    ]
    for title, lora in (("All weights", False), ("LoRA, r = 16", True)):
        found = measure(options.model.resolve(), lora, options.work.resolve() / title.split()[0])
        lines += ["", f"## {title}", "", *lines_of(found)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
