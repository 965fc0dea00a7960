"""The rows of a run that is over or still going: from its folder, or from MLflow, also as other trainers log there.

A row is (step, name -> value), in the order in which they were logged. Names become this project's: what TRL and the
transformers Trainer call otherwise is in `ALIASES`, and beginnings in `_prefixed`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alignment import runs
from alignment.diagnosis import trains
from alignment.errors import UserError

Row = tuple[int, dict[str, float]]

ALIASES: Mapping[str, str] = {
    # the transformers Trainer
    "learning_rate": "lr",
    # TRL's PPO
    "policy/entropy_avg": "entropy",
    "objective/scores": "reward",
    "val/ratio": "ratio",
    # TRL's GRPO, before 0.18
    "completion_length": "completions/mean_length",
    "clip_ratio": "clip_ratio/region_mean",
    "mean_kl": "kl",
}
"""Name elsewhere -> name here, used in rows that do not have the latter."""
SUMMARY = ("train_runtime", "train_loss", "train_samples_per_second", "train_steps_per_second", "total_flos")
"""What the transformers Trainer logs once, at the end, about the whole run."""
_STAGES = {"train/": "", "eval/": "val/", "eval_": "val/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What a run logged.

    Args:
        title: of the run, in a few words. rows: as they were logged; what a resumed run did again counts once.
        held_out: names of rewards with weight 0, which the policy is not trained on.
        note: for the user, "" without any.
        settings: the resolved configuration, dotted key -> value as text; in MLflow a run's parameters.
        folder: of the run; None in MLflow.
    """

    title: str
    rows: list[Row]
    held_out: tuple[str, ...] = field(default=())
    note: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


def own_names(values: Mapping[str, float]) -> dict[str, float]:
    """The row under this project's names."""
    row = {_prefixed(name): float(value) for name, value in values.items() if name not in SUMMARY}
    for other, name in ALIASES.items():
        if other in row and name not in row:
            row[name] = row.pop(other)
    return row


def _prefixed(name: str) -> str:
    for beginning, instead in _STAGES.items():
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)
    return name


def settled(rows: Iterable[Row]) -> list[Row]:
    """Without what was done again: a run that resumes begins at its checkpoint, before the last rows it has logged. An
    evaluation of an earlier checkpoint by itself (`alignment validate`) is left out."""
    kept: list[Row] = []
    for step, values in rows:
        if kept and step < kept[-1][0]:
            if not trains(values):
                continue
            while kept and kept[-1][0] >= step:
                kept.pop()
        if values:
            kept.append((step, values))
    return kept


# ---------------------------------------------------------------------- a run's folder


def find(name: str, root: Path, tracking_uri: str | None) -> Log:
    """The log of a run by its folder, its id or its name, or of the newest run (`last`).

    With `tracking_uri` it is looked for in that MLflow; else below `root`, first among the run folders and then in its
    `mlflow.db`. Raises UserError where there is none.
    """
    if tracking_uri is None:
        if (found := _in_folders(name, root)) is not None:
            return found
        database = root.resolve() / "mlflow.db"
        if not database.is_file():
            raise UserError(f"no run '{name}' below {root / 'runs'}, and no {database}; give a folder, an id or a name")
        tracking_uri = f"sqlite:///{database}"
    return of_mlflow(name, tracking_uri)


def _in_folders(name: str, root: Path) -> Log | None:
    if (Path(name) / "metrics.jsonl").is_file():
        return of_folder(Path(name))
    known = [(f, r) for f, r in runs.find_runs(root, None) if (f / "metrics.jsonl").is_file()]
    if name == "last":
        named = [(folder, record) for folder, record in known if record.get("trains", True)]
    else:
        named = [(folder, record) for folder, record in known if name in (folder.name, record.get("run_name"))]
    return of_folder(named[0][0], others=len(named) - 1 if name != "last" else 0) if named else None


def of_folder(folder: Path, others: int = 0) -> Log:
    """Of a run's folder. A last line that is still being written is left out."""
    record = runs.read_record(folder) or {}
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line) if line else None
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{folder / 'metrics.jsonl'} line {number} is damaged: {error}") from error
        if values:
            step = int(values.pop("step"))
            values.pop("time", None)
            rows.append((step, own_names(values)))
    config = _configured(folder)
    return Log(
        title=f"run {runs.label(folder, record)}",
        rows=settled(rows),
        held_out=_weightless(_rewards(config)),
        note=_more(others),
        settings=dict(_flat(config)),
        folder=folder,
    )


def _more(others: int) -> str:
    return f"the newest of {others + 1} runs of that name" if others else ""


def _configured(folder: Path) -> Mapping[str, Any]:
    """The run's resolved configuration; empty where it has none."""
    try:
        config = yaml.safe_load((folder / "config" / "fit.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return config if isinstance(config, dict) else {}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values as text; entries of a list are numbered."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if inner is None or not value:
        yield key, str(value)
        return
    for name, below in inner:
        yield from _flat(below, f"{key}.{name}" if key else str(name))


def _rewards(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """name -> reward."""
    model = config.get("model")
    settings = model.get("init_args", {}) if isinstance(model, dict) else {}
    rewards = settings.get("rewards") if isinstance(settings, dict) else None
    return rewards if isinstance(rewards, dict) else {}


def _weightless(rewards: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, spec in rewards.items() if isinstance(spec, dict) and spec.get("weight") == 0)


# ---------------------------------------------------------------------- MLflow


def of_mlflow(name: str, tracking_uri: str) -> Log:
    """Of a run in MLflow by its id or its name: the newest of that name."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        client = MlflowClient(tracking_uri)
        run, others = _run(client, name)
        entries = [
            (metric.timestamp, metric.step, metric.key, metric.value)
            for key in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, key)
        ]
    except MlflowException as error:
        raise UserError(f"MLflow at {tracking_uri}: {str(error).splitlines()[0]}") from error
    grouped: dict[tuple[int, int], dict[str, float]] = {}
    for at, step, key, value in sorted(entries):
        grouped.setdefault((at, step), {})[key] = value
    weights = {
        key.removeprefix("rewards/").removesuffix("/weight"): value
        for key, value in run.data.params.items()
        if key.startswith("rewards/") and key.endswith("/weight")
    }
    return Log(
        title=f"run {run.info.run_id} '{run.info.run_name}'",
        rows=settled((step, own_names(values)) for (_, step), values in grouped.items()),
        held_out=tuple(reward for reward, weight in weights.items() if _is_zero(weight)),
        note=_more(others),
        settings=run.data.params,
    )


def _run(client: Any, name: str) -> tuple[Any, int]:
    """(the run, how many others have its name)."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(name), 0
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # it may be a name
            raise
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    mark = '"' if "'" in name else "'"
    found = client.search_runs(
        experiments, filter_string=f"attributes.run_name = {mark}{name}{mark}", order_by=["attributes.start_time DESC"]
    )
    if not found:
        raise UserError(f"there is no run '{name}' in this MLflow; give a run's id or its name")
    return found[0], len(found) - 1


def _is_zero(text: str) -> bool:
    try:
        return float(text) == 0
    except ValueError:
        return False


def held_out_metrics(rewards: Sequence[str]) -> tuple[str, ...]:
    """The metrics of rewards that the policy is not trained on."""
    return tuple(f"{stage}rewards/{name}/mean" for name in rewards for stage in ("", "val/"))
