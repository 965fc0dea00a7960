"""What is searched, over which runs, and where it is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alignment import runs
from alignment.errors import UserError
from alignment.tuning.process import FitProcess, Metrics
from alignment.tuning.space import Space, Value

MODES = {"min": "minimize", "max": "maximize"}
LOGGER = "alignment.tracking.TrackingLogger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A study.

    Args:
        name: of the study, in MLflow and in names of runs.
        words: after `alignment fit` of every run, before what is searched.
        config: resolved, of these words.
        space: dotted key -> range or choices.
        objectives: metric -> "min" or "max".
        folder: where the study is kept.
        seed: of everything that is drawn.
        stopping: set when everything is to end.
    """

    name: str
    words: Sequence[str]
    config: Mapping[str, Any]
    space: Space
    objectives: Mapping[str, str]
    folder: Path
    seed: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        wrong = {mode for mode in self.objectives.values() if mode not in MODES}
        if wrong or not self.objectives:
            raise UserError("an objective is METRIC=max or METRIC=min, for example val/loss=min")
        if self.logger.get("class_path") != LOGGER:
            raise UserError(f"a study reads what runs log in their folders: trainer.logger must be {LOGGER}")

    @property
    def logger(self) -> Mapping[str, Any]:
        found = self.config["trainer"].get("logger")
        return found if isinstance(found, Mapping) else {}

    @property
    def root(self) -> Path:
        """Folder of `runs` and of MLflow's database."""
        return Path(self.logger["init_args"]["root"])

    @property
    def experiment(self) -> str:
        return str(self.logger["init_args"]["experiment_name"])

    def process(self, name: str, values: Mapping[str, Value], parent: str | None, *more: str) -> FitProcess:
        """A run of the study, nested in MLflow below `parent`."""
        words = [*self.words, *(f"--{key}={as_word(value)}" for key, value in values.items()), *more]
        if parent is not None:
            tags = {**(self.logger["init_args"].get("tags") or {}), "mlflow.parentRunId": parent}
            words.append(f"--trainer.logger.tags={json.dumps(tags)}")
        log = self.folder / "logs" / f"{runs.safe_name(name)}.log"
        return FitProcess(words, name=name, root=self.root, log=log, stopping=self.stopping)


def as_word(value: Value) -> str:
    """As a flag's value, which the command line reads as YAML (where 1e-05 without a point would be text)."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def wanted(metrics: Metrics, objectives: Mapping[str, str], name: str) -> list[float]:
    """The last values of the objectives. Raises UserError for one that a run never logged."""
    for metric in objectives:
        if metric not in metrics:
            logged = ", ".join(sorted(m for m in metrics if m.startswith("val/"))) or "none of validation"
            raise UserError(f"run {name} has not logged '{metric}'; it logged {logged}")
    return [metrics[metric] for metric in objectives]
