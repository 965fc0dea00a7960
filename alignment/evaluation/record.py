"""Where results go: the terminal, a file, and the MLflow run of the model, or one of their own."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alignment import runs
from alignment.evaluation.base import Result, Subject
from alignment.whole_file import write_whole

log = logging.getLogger(__name__)

EXPERIMENT = "evaluation"


def show(console: Console, task: str, result: Result) -> None:
    """One task as a table."""
    table = Table(title=task, title_justify="left")
    for column in ("metric", "value", "95 %"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, value in result.metrics.items():
        between = result.intervals.get(name)
        known = between is not None and not math.isnan(between[0])
        table.add_row(Text(name), f"{value:.4g}", "{:.4g} to {:.4g}".format(*between) if known and between else "")
    console.print(table)


def write(path: Path, subject: str, results: Mapping[str, Result]) -> None:
    """Everything as JSON."""
    found = {
        name: {"metrics": dict(r.metrics), "intervals": {k: list(v) for k, v in r.intervals.items()},
               "table": [dict(row) for row in r.table]}
        for name, r in results.items()
    }  # fmt: skip
    text = json.dumps({"model": subject, "tasks": found}, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, text.encode("utf-8"))


def track(subject: Subject, results: Mapping[str, Result], path: Path, tracking_uri: str | None) -> str | None:
    """Log to the run that trained the model, or to a new one; returns its id, None where the tracker does not answer.

    Metrics are `eval/<task>/<metric>`, tables `eval/<task>.json`.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.tracking import MlflowClient

    try:
        client = MlflowClient(tracking_uri or f"sqlite:///{subject.root.resolve()}/mlflow.db")
        run = _run(client, subject)
        for task, result in results.items():
            for name, value in result.metrics.items():
                client.log_metric(run, f"eval/{task}/{_safe(name)}", value)
            if result.table:
                columns: dict[str, Any] = {key: [row[key] for row in result.table] for key in result.table[0]}
                client.log_table(run, columns, f"eval/{task}.json")
        client.log_artifact(run, str(path), "eval")
    except Exception as error:  # whatever a tracker raises: the results are in the file
        log.warning("the results are not in MLflow: %s", error)
        return None
    return run


def _run(client: Any, subject: Subject) -> str:
    record = runs.read_record(subject.run) if subject.run is not None else None
    if record is not None and record.get("run_id"):
        return str(record["run_id"])
    experiment = client.get_experiment_by_name(EXPERIMENT)
    number = client.create_experiment(EXPERIMENT) if experiment is None else experiment.experiment_id
    run = client.create_run(number, run_name=subject.name, tags={"model": subject.name})
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)


def _safe(name: str) -> str:
    """MLflow's names of metrics hold letters, digits and some signs."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
