"""What a study leaves: YAML of the best, tables, pictures, and a parent run in MLflow."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from alignment.tuning.plan import Plan
from alignment.tuning.space import Value, overlay

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

    from alignment.tuning.population import Member

log = logging.getLogger(__name__)

BEST = "best.yaml"


def write_overlay(plan: Plan, path: Path, values: Mapping[str, Value], why: str) -> None:
    """A fragment for `alignment fit -c BASE -c FRAGMENT`."""
    text = yaml.safe_dump(overlay(plan.config, values), sort_keys=False)
    path.write_text(f"# Study {plan.name}: {why}\n{text}", encoding="utf-8")


# ------------------------------------------------------------------------------------------------- a search


def write_search(plan: Plan, study: Study) -> list[Path]:
    """Every file of a finished search: best.yaml, or pareto_N.yaml with several objectives; trials.json; pictures."""
    files = []
    for place, trial in enumerate(best_trials(study)):
        path = plan.folder / (BEST if len(plan.objectives) == 1 else f"pareto_{place + 1}.yaml")
        write_overlay(plan, path, trial.params, f"trial {trial.number}, {scores(plan, trial.values)}")
        files.append(path)
    rows = [
        {"number": t.number, "state": t.state.name.lower(), "values": t.values, "params": t.params, **t.user_attrs}
        for t in study.trials
    ]
    (plan.folder / "trials.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return [*files, plan.folder / "trials.json", *draw_search(plan, study)]


def best_trials(study: Study) -> list[FrozenTrial]:
    """The best one, or with several objectives those that no other one beats in all of them."""
    if len(study.directions) == 1:
        return [study.best_trial] if any(t.state.name == "COMPLETE" for t in study.trials) else []
    return sorted(study.best_trials, key=lambda trial: trial.number)


def scores(plan: Plan, values: Sequence[float]) -> str:
    return ", ".join(f"{metric} {value:.4g}" for metric, value in zip(plan.objectives, values, strict=True))


def draw_search(plan: Plan, study: Study) -> list[Path]:
    """History and importance of each objective; with two or three of them the Pareto front. A picture that cannot be
    drawn (too few trials, one setting) is left out."""
    from optuna.visualization import matplotlib as plots

    finished = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    found: list[Path] = []
    for place, metric in enumerate(plan.objectives):
        target: dict[str, Any] = {}
        if len(plan.objectives) > 1:
            target = {"target": lambda trial, place=place: trial.values[place], "target_name": metric}
        mark = f"_{place + 1}" if len(plan.objectives) > 1 else ""
        found += _picture(plan, f"history{mark}", partial(plots.plot_optimization_history, study, **target))
        if len(finished) > 2 and len(plan.space) > 1:
            found += _picture(plan, f"importance{mark}", partial(plots.plot_param_importances, study, **target))
    if len(plan.objectives) in (2, 3):
        front = partial(plots.plot_pareto_front, study, target_names=list(plan.objectives))
        found += _picture(plan, "pareto", front)
    return found


def _picture(plan: Plan, name: str, draw: Any) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = plan.folder / f"{name}.png"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts and experimental functions
            axes = draw()
        axes.figure.savefig(path, dpi=110, bbox_inches="tight")
    except (ValueError, RuntimeError) as error:  # all trials equal, for one
        log.warning("no picture %s: %s", path.name, error)
        return []
    finally:
        pyplot.close("all")
    return [path]


# ------------------------------------------------------------------------------------------------- a population


def write_population(plan: Plan, members: Sequence[Member], interval: int) -> list[Path]:
    """best.yaml with the last values of the best member; schedule.json and schedule.png: how its values moved."""
    best = members[0]
    (metric,) = plan.objectives
    why = f"the values that the best run ended with ({metric} {best.score:.4g}); its state is {best.checkpoint}"
    write_overlay(plan, plan.folder / BEST, best.values, why)
    parts = [{"from_batch": i * interval, **part} for i, part in enumerate(best.history)]
    (plan.folder / "schedule.json").write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")
    return [plan.folder / BEST, plan.folder / "schedule.json", _draw_schedule(plan, members, interval)]


def _draw_schedule(plan: Plan, members: Sequence[Member], interval: int) -> Path:
    from matplotlib.figure import Figure

    (metric,) = plan.objectives
    numeric = [key for key in plan.space if isinstance(members[0].values[key], int | float)]
    figure = Figure(figsize=(3.2 * (1 + len(numeric)), 2.8), layout="constrained")
    panels = figure.subplots(1, 1 + len(numeric), squeeze=False)[0]
    for place, member in reversed(list(enumerate(members))):
        look: dict[str, Any] = {"color": "C0" if place == 0 else "0.75", "linewidth": 2 if place == 0 else 1}
        batches = [(i + 1) * interval for i in range(len(member.history))]
        panels[0].plot(batches, [part["score"] for part in member.history], marker=".", **look)
        for panel, key in zip(panels[1:], numeric, strict=True):
            panel.step(batches, [part["values"][key] for part in member.history], where="pre", **look)
    for panel, name in zip(panels, [metric, *numeric], strict=True):
        panel.set(title=name, xlabel="batches")
        panel.spines[["top", "right"]].set_visible(False)
    path = plan.folder / "schedule.png"
    figure.savefig(path, dpi=110)
    return path


# ------------------------------------------------------------------------------------------------- MLflow


@contextmanager
def parent_run(plan: Plan) -> Iterator[tuple[str | None, list[Path]]]:
    """The MLflow run that those of a study lie below: its id, and a list of files to put there at the end.

    The same run again where a study goes on. None where the tracker does not answer: a study does without.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    files: list[Path] = []
    kept = plan.folder / "mlflow_run"
    try:
        client, run = _open(plan, kept)
    except Exception as error:  # whatever a tracker raises: it must not cost the study
        log.warning("the study is not in MLflow: %s", error)
        yield None, files
        return
    status = "FAILED"
    try:
        yield run, files
        status = "FINISHED"
    finally:
        try:
            for file in files:
                client.log_artifact(run, str(file))
            client.set_terminated(run, status)
        except Exception as error:  # as above
            log.warning("the study's files are not in MLflow: %s", error)


def _open(plan: Plan, kept: Path) -> tuple[Any, str]:
    from mlflow.tracking import MlflowClient

    logger = plan.logger["init_args"]
    client = MlflowClient(logger.get("tracking_uri") or f"sqlite:///{plan.root.resolve()}/mlflow.db")
    if kept.exists():
        run = kept.read_text(encoding="utf-8").strip()
        client.update_run(run, status="RUNNING")
        return client, run
    experiment = client.get_experiment_by_name(plan.experiment)
    number = client.create_experiment(plan.experiment) if experiment is None else experiment.experiment_id
    run = client.create_run(number, run_name=plan.name, tags={"study": plan.name}).info.run_id
    for key, dimension in plan.space.items():
        client.log_param(run, f"space/{key}", str(dimension))
    plan.folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(run + "\n", encoding="utf-8")
    return client, run
