"""Experiment tracking: MLflow on a local sqlite file (or a given server), with everything also on local disk.

Layout under `root`: `mlflow.db`, `artifacts/` (MLflow's), and one folder per run, `runs/<experiment>/<run id>/`, with
`run.json`, `metrics.jsonl`, `config/` and `checkpoints/`. Calls to MLflow go through a background queue (`outbox.py`):
a tracker that refuses, hangs or fails costs a run at most one second and never raises.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from filelock import FileLock
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.fabric.utilities.logger import _add_prefix, _convert_params, _flatten_dict
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from alignment import provenance, runs
from alignment.outbox import Outbox, TrackerAway, TrackerRefused, first_line, reach
from alignment.tracker_client import Client

PARAM_LIMIT = 6000
"""Characters MLflow keeps of one parameter; longer values are whole in the artifact `params/<name>.txt`."""
_PARAMS_PER_CALL = 100
_CREATE_TABLES_SECONDS = 120.0
_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
Record = Callable[[Client, str], object]
"""A call on the tracker: (client, run id) -> anything."""


class DatasetInfo(Protocol):
    """What the tracker records of one data set."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def digest(self) -> str: ...


@runtime_checkable
class HasDatasetInputs(Protocol):
    """A datamodule that can say which data it feeds."""

    def dataset_inputs(self) -> list[Any]: ...


class TrackingLogger(MLFlowLogger):
    """MLflow logger for runs that must not depend on MLflow.

    Args:
        experiment_name: Experiment in MLflow and folder under `runs/`.
        run_name: Name in MLflow, any text; None: the model's name and the time. Folders are named by the run's id.
        root: Folder for the database, the artifacts and the run folders.
        tracking_uri: Tracking server to use in place of `sqlite:///<root>/mlflow.db`.
        tags: Tags of the run.
        run_id: Run to continue, or to evaluate. Its parameters stay; changed ones are recorded as an artifact.
        prefix: Put before every metric name.
    """

    def __init__(
        self,
        experiment_name: str = "alignment",
        run_name: str | None = None,
        root: str = ".",
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        run_id: str | None = None,
        prefix: str = "",
    ) -> None:
        # Not MLFlowLogger.__init__: it would connect, and create the database, on every rank before the run is known.
        super(MLFlowLogger, self).__init__()
        self.root = Path(root).resolve()
        self._tracking_uri = tracking_uri or f"sqlite:///{self.root}/mlflow.db"
        self._experiment_name = experiment_name
        self._experiment_id = None
        self._run_name = run_name
        self._run_id = run_id
        self.tags = dict(tags or {})
        self._prefix = prefix
        self._client: Client | None = None
        self._folder_id = run_id
        self._continues = run_id is not None
        self._turn = 0
        self._known_params: dict[str, str] = {}
        self._refusal: str | None = None
        self._record: dict[str, Any] = {}
        self._started = False
        self._disk_failed = False
        self._outbox = Outbox(f"MLflow at {self._tracking_uri}")

    # ------------------------------------------------------------------ names and places

    @property
    def save_dir(self) -> str:
        """With `name` and `version` below it, ModelCheckpoint's default folder is `<run folder>/checkpoints`."""
        return str(self.root / "runs")

    @property
    def name(self) -> str:
        return runs.safe_name(self._experiment_name)

    @property
    def version(self) -> str | None:
        """The run's folder name: MLflow's run id, or a local one when the tracker was away at the start. None on a rank
        that neither is rank 0 nor was told (`adopt`)."""
        self._start()
        return self._folder_id

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        if self.version is None:
            raise ValueError("only rank 0 knows the run folder; call adopt(folder id) on the other ranks first")
        return runs.run_folder(self.root, self._experiment_name, str(self._folder_id))

    @property
    def run_id(self) -> str | None:
        """MLflow's run id; None on other ranks and while the tracker is away."""
        self._start()
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        self._start()
        return self._experiment_id

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MLflow client, for direct use; a stand-in that ignores every call while the tracker is away."""
        self._start()
        return self._client if self._client is not None else _DummyExperiment()

    @property
    def turn(self) -> int:
        """How often this run was continued, this time included; where it only is evaluated now, how often it was."""
        self._start()
        return self._turn

    @property
    def _visits(self) -> bool:
        """Whether a run that is there is evaluated: what is recorded of its training then stays as it is."""
        return self._continues and not self._record.get("trains", True)

    def annotate(self, **record: Any) -> None:
        """Add to the run's `run.json`: `model`, its class, and `trains`, whether this process trains it or only
        evaluates. Call before the run starts."""
        self._record.update(record)

    def adopt(self, folder_id: str | None) -> None:
        """Take rank 0's folder name on another rank."""
        self._folder_id = folder_id

    # ------------------------------------------------------------------ starting

    @rank_zero_only
    def _start(self) -> None:
        """Create or reopen the run. Waits for the tracker as long as the outbox allows, then goes on without it."""
        if self._started:
            return
        self._started = True
        import mlflow.tracking  # noqa: F401  # here: its two seconds are not the tracker's, and must not use up its budget

        local = self._tracking_uri.startswith("sqlite:")
        self._outbox.put(self._connect, **({"patience": _CREATE_TABLES_SECONDS} if local else {}))
        self._outbox.wait()
        if self._refusal is not None:
            what = f"continue run '{self._run_id}'" if self._run_id else f"start a run in '{self._experiment_name}'"
            raise ValueError(f"MLflow cannot {what}: {self._refusal}")
        self._folder_id = self._run_id or f"local-{uuid.uuid4().hex[:12]}"
        if self._visits:
            return
        folder = runs.run_folder(self.root, self._experiment_name, self._folder_id)
        record = {
            "experiment": self._experiment_name,
            "run_name": self._run_name or (runs.read_record(folder) or {}).get("run_name"),
            "run_id": self._run_id,
            "started": time.time(),
            **self._record,
        }
        self._on_disk(lambda: runs.write_record(folder, record))
        self._send_tags(folder)

    def _connect(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # training does not phone home
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would run into the trainer's
        # The outbox retries; the client need not, and a hanging server must not hold the queue for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        client = reach(self._open_client)
        run_id = self._run_id
        try:
            reach(lambda: self._continue_run(client, run_id) if run_id else self._create_run(client))
        except TrackerRefused as ex:
            self._refusal = str(ex)
            raise
        self._client = client
        self._initialized = True

    def _open_client(self) -> Client:
        from mlflow.tracking import MlflowClient

        if not self._tracking_uri.startswith("sqlite:///"):
            return MlflowClient(self._tracking_uri)
        self.root.mkdir(parents=True, exist_ok=True)
        database = Path(self._tracking_uri.removeprefix("sqlite:///"))
        # MLflow would retry an unwritable or locked database for hours; ask first. The lock: two runs that start
        # together in a new folder must not both create the tables.
        with FileLock(f"{database}-init.lock", timeout=_CREATE_TABLES_SECONDS):
            with sqlite3.connect(database, timeout=0.5) as probe:
                probe.execute("BEGIN IMMEDIATE")
            probe.close()
            return MlflowClient(self._tracking_uri)

    def _create_run(self, client: Client) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.context.registry import resolve_tags

        experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            try:
                identity = client.create_experiment(self._experiment_name, artifact_location=self._artifact_root())
            except MlflowException as ex:
                if ex.error_code == "RESOURCE_ALREADY_EXISTS":  # another run was first; the retry finds its experiment
                    raise TrackerAway(first_line(ex)) from ex
                raise
        else:
            identity = experiment.experiment_id
            if experiment.lifecycle_stage == "deleted":
                client.restore_experiment(identity)
        self._experiment_id = identity
        # MLflow draws names from Python's generator, which a seeded run has just set: all would be called the same.
        model = str(self._record.get("model", "run")).rpartition(".")[2]
        name = self._run_name or f"{model} {time.strftime('%Y-%m-%d %H:%M:%S')}"
        run = client.create_run(identity, tags=resolve_tags(self.tags), run_name=name)
        self._run_id = run.info.run_id

    def _artifact_root(self) -> str | None:
        """A server decides where its artifacts go; beside a local database they go under `root`."""
        return str(self.root / "artifacts") if self._tracking_uri.startswith("sqlite:") else None

    def _continue_run(self, client: Client, run_id: str) -> None:
        run = client.get_run(run_id)
        self._experiment_id = run.info.experiment_id
        self._experiment_name = client.get_experiment(run.info.experiment_id).name
        self._known_params = dict(run.data.params)
        tag = "evaluations" if self._visits else "resumes"
        self._turn = int(run.data.tags.get(tag, 0)) + 1
        client.set_tag(run_id, tag, self._turn)
        if not self._visits:
            client.update_run(run_id, status="RUNNING")

    def _send_tags(self, folder: Path) -> None:
        tags = {**provenance.code_version(), **provenance.package_versions(), "run_folder": str(folder)}
        from mlflow.entities import RunTag

        self.record(lambda client, run: client.log_batch(run, tags=[RunTag(k, v) for k, v in tags.items()]))

    # ------------------------------------------------------------------ logging

    @rank_zero_only
    def record(self, call: Record) -> None:
        """Queue a call on the tracker, in order with all others. Never blocks, never raises for a tracker's sake."""
        self._start()
        self._outbox.put(lambda: reach(lambda: self._with_run(call)))

    def _with_run(self, call: Record) -> None:
        if self._client is None or self._run_id is None:
            raise TrackerRefused("there is no run to record into")
        call(self._client, self._run_id)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Metrics at a step: at once to `metrics.jsonl`, then to MLflow. NaN stays NaN."""
        self._start()
        values = {k: float(v) for k, v in _add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items()}
        now, at = time.time(), step or 0
        line = json.dumps({"step": at, "time": round(now, 3), **values})
        self._append(self.run_dir / "metrics.jsonl", line + "\n")
        from mlflow.entities import Metric

        entries = [Metric(_metric_name(k), v, int(now * 1000), at) for k, v in values.items()]
        self.record(lambda client, run: client.log_batch(run, metrics=entries))

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Parameters, each value whole. On a continued run new ones are added and changed ones go into an artifact."""
        self._start()
        flat = {_param_name(k): str(v) for k, v in _flatten_dict(_convert_params(params)).items()}
        self.record(lambda client, run: self._send_params(client, run, flat))

    def _send_params(self, client: Client, run: str, flat: dict[str, str]) -> None:
        from mlflow.entities import Param

        known = self._known_params
        new = {k: v for k, v in flat.items() if k not in known}
        changed = {k: [known[k], v] for k, v in flat.items() if k in known and known[k] != v[:PARAM_LIMIT]}
        entries = [Param(k, v[:PARAM_LIMIT]) for k, v in new.items()]
        for first in range(0, len(entries), _PARAMS_PER_CALL):
            client.log_batch(run, params=entries[first : first + _PARAMS_PER_CALL])
        for k, v in new.items():
            if len(v) > PARAM_LIMIT:
                client.log_text(run, v, f"params/{k.replace('/', '.')}.txt")
        if changed:
            what = "changed-evaluation" if self._visits else "changed"
            client.log_dict(run, changed, f"config/{what}-{self._turn}.json")
        known.update((k, v[:PARAM_LIMIT]) for k, v in new.items())

    @rank_zero_only
    def log_text(self, text: str, artifact: str) -> None:
        """A text artifact, also as a file under the run folder. `artifact`: relative path such as `config/fit.yaml`."""
        self._start()
        target = (self.run_dir / artifact).resolve()
        if not target.is_relative_to(self.run_dir):
            raise ValueError(f"artifact {artifact!r} leads out of the run folder; give a relative path inside it")
        self._on_disk(lambda: _write(target, text))
        self.record(lambda client, run: client.log_text(run, text, artifact))

    @rank_zero_only
    def log_file(self, path: Path) -> None:
        """A file that exists, as an artifact of its name; a later version replaces it."""
        self.record(lambda client, run: client.log_artifact(run, str(path)))

    @rank_zero_only
    def log_datasets(self, datasets: list[DatasetInfo]) -> None:
        """Data sets as MLflow inputs of the run: name, rows, digest, and the split as context."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

        inputs = [
            DatasetInput(
                dataset=Dataset(
                    name=d.name,
                    digest=d.digest[:36],  # MLflow's limit
                    source_type="path",
                    source=json.dumps({"path": d.path, "split": d.split, "digest": d.digest}),
                    profile=json.dumps({"num_rows": d.rows}),
                ),
                tags=[InputTag(key=MLFLOW_DATASET_CONTEXT, value=d.split)],
            )
            for d in datasets
        ]
        self.record(lambda client, run: client.log_inputs(run, datasets=inputs))

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Send what is queued and close the run. With the tracker away, say where the metrics are."""
        if not self._started:
            return
        if not self._visits:  # its end is that of its training
            self.record(lambda client, run: client.set_terminated(run, _STATUS.get(status, "FAILED")))
        if not self._outbox.wait():
            rank_zero_warn(f"{len(self._outbox)} records did not reach MLflow; the metrics are in {self.run_dir}")

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Checkpoints stay in the run folder; copying each into the artifacts would double the disk use."""

    # ------------------------------------------------------------------ local disk

    def _append(self, path: Path, text: str) -> None:
        def append() -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)

        self._on_disk(append)

    def _on_disk(self, write: Callable[[], None]) -> None:
        """A full or read-only disk must not stop training either: warned about once."""
        try:
            write()
        except OSError as ex:
            if not self._disk_failed:
                rank_zero_warn(f"cannot write the run's local files: {ex}")
            self._disk_failed = True


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _metric_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_/. -]+", "_", name)[:250]


def _param_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_/. -]+", "_", name)[:250]
