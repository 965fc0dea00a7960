"""`alignment evaluate MODEL -c TASKS`: measure a model by the tasks of a YAML file."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from alignment.cli_errors import suggest
from alignment.errors import UserError
from alignment.evaluation import record
from alignment.evaluation.base import Result, Subject, Task

TASKS = {
    "Perplexity": "alignment.evaluation.likelihood",
    "MultipleChoice": "alignment.evaluation.likelihood",
    "PreferenceAccuracy": "alignment.evaluation.likelihood",
    "Replies": "alignment.evaluation.replies",
    "Safety": "alignment.evaluation.safety",
    "Diversity": "alignment.evaluation.replies",
    "PassAtK": "alignment.evaluation.wins",
    "WinRate": "alignment.evaluation.wins",
    "MTBench": "alignment.evaluation.conversations",
    "LmEval": "alignment.evaluation.harness",
}
"""Task -> module of its class; any other is an import path."""


def main(argv: Sequence[str]) -> int:
    """Returns 0; raises UserError for a mistake, before the model is loaded where that is possible."""
    given = _parser().parse_args(argv)
    tasks = {name: build(name, settings) for path in given.config for name, settings in read(path).items()}
    if given.only:
        if unknown := sorted(set(given.only) - set(tasks)):
            raise UserError(f"--only {unknown[0]}: there are {', '.join(tasks)}")
        tasks = {name: tasks[name] for name in given.only}
    subject = Subject(given.model, root=given.root, device=given.device, seed=given.seed)
    console = Console(highlight=False)
    results: dict[str, Result] = {}
    for name, task in tasks.items():
        results[name] = task.run(subject)
        record.show(console, name, results[name])
        record.write(given.out, given.model, results)  # after each: a task that fails costs nothing that was measured
    run = None if given.no_tracking else record.track(subject, results, given.out, given.tracking_uri)
    console.print(f"{given.out} holds the results" + (f"; in MLflow they are in run {run}" if run else ""))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alignment evaluate",
        description="Measure a policy or a reward model by tasks of YAML files.",
        epilog="alignment evaluate last -c configs/evaluate/support.yaml",
    )
    parser.add_argument("model", help="hub id, folder, GGUF file, checkpoint, run, last or best")
    parser.add_argument("-c", "--config", action="append", type=Path, required=True, help="tasks; several")
    parser.add_argument("--only", action="append", metavar="TASK", help="of the files, only this one; several")
    parser.add_argument("--out", type=Path, default=Path("evaluation.json"), help="default: evaluation.json")
    parser.add_argument("--seed", type=int, default=0, help="of sampled replies (default: 0)")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder of `runs` and mlflow.db (default: here)")
    parser.add_argument("--tracking_uri", help="another MLflow")
    parser.add_argument("--no_tracking", action="store_true", help="leave MLflow out")
    return parser


def read(path: Path) -> Mapping[str, dict[str, Any]]:
    """name -> settings of the tasks of a file."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read '{path}': {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not all(isinstance(s, dict) and "task" in s for s in found.values()):
        raise UserError(f"'{path}' holds no tasks; give NAME: {{task: Perplexity, path: ...}} (docs/evaluate.md)")
    return {str(name): settings for name, settings in found.items()}


def build(name: str, settings: Mapping[str, Any]) -> Task:
    """The task. Raises UserError for a class that is none, a setting it has not, and what it says itself."""
    kind = str(settings["task"])
    arguments = {key: value for key, value in settings.items() if key != "task"}
    cls = _class(name, kind)
    known = inspect.signature(cls).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if not open_ended and (unknown := sorted(set(arguments) - set(known))):
        meant = suggest(unknown[0], known)
        hint = f"; did you mean '{meant}'?" if meant else ""
        raise UserError(f"{name}: {kind} has no setting '{unknown[0]}'{hint}")
    needed = [n for n, p in known.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if missing := sorted(set(needed) - set(arguments)):
        raise UserError(f"{name}: {kind} needs {', '.join(missing)}")
    try:
        task: Task = cls(**arguments)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    return task


def _class(name: str, kind: str) -> Any:
    module, _, cls = kind.rpartition(".")
    if not module and kind not in TASKS:
        meant = suggest(kind, TASKS)
        hint = f"did you mean '{meant}'?" if meant else f"there are {', '.join(TASKS)}"
        raise UserError(f"{name}: no task '{kind}'; {hint} Your own is an import path: my_tasks.Mine")
    try:
        return getattr(importlib.import_module(module or TASKS[kind]), cls)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{name}: no task '{kind}': {error}") from error
