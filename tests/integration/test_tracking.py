"""The tracker: what a run leaves behind, and what happens when MLflow is not there (R19)."""

from __future__ import annotations

import http.server
import json
import math
import random
import socket
import sqlite3
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignment import provenance, runs
from alignment.tracking import TrackingLogger
from tests.cli_toys import Rows


@pytest.fixture
def logger(workdir: Path) -> TrackingLogger:
    return TrackingLogger(run_name="first")


def test_values_are_whole(logger: TrackingLogger) -> None:
    logger.log_hyperparams({"policy": {"name": "x" * 1000}, "text": "y" * 7000, "none": None, "list": [1, {"a": 2}]})
    logger.finalize()
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params["policy/name"] == "x" * 1000
    assert run.data.params["none"] == "None"
    assert run.data.params["list"] == "[1, {'a': 2}]"
    whole = logger.experiment.download_artifacts(logger.run_id, "params/text.txt")
    assert Path(whole).read_text() == "y" * 7000
    assert run.info.status == "FINISHED"


def test_metrics_are_also_on_disk(logger: TrackingLogger) -> None:
    logger.log_metrics({"loss": 1.5, "rewards/chosen": float("nan"), "odd@name": 2.0}, step=7)
    logger.finalize()
    line = json.loads((logger.run_dir / "metrics.jsonl").read_text())
    assert (line["step"], line["loss"], line["odd@name"]) == (7, 1.5, 2.0)
    assert math.isnan(line["rewards/chosen"])
    history = logger.experiment.get_metric_history(logger.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(7, 1.5)]
    assert logger.experiment.get_run(logger.run_id).data.metrics["odd_name"] == 2.0


def test_everything_lies_under_the_root(logger: TrackingLogger, workdir: Path) -> None:
    logger.log_text("a: 1\n", "config/fit.yaml")
    logger.finalize()
    assert sorted(p.name for p in workdir.iterdir() if not p.name.startswith("mlflow.db")) == ["artifacts", "runs"]
    assert logger.run_dir == workdir / "runs" / "alignment" / str(logger.run_id)
    assert Path(logger.save_dir, logger.name, str(logger.version)) == logger.run_dir
    assert (logger.run_dir / "config" / "fit.yaml").read_text() == "a: 1\n"


def test_datasets_and_code_version(logger: TrackingLogger) -> None:
    digest = "0123456789abcdef" * 4
    logger.log_datasets([Rows(name="pairs", path="pairs.jsonl", split="train", rows=12, digest=digest)])
    logger.finalize()
    run = logger.experiment.get_run(logger.run_id)
    (entry,) = run.inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("pairs", digest[:36])
    assert json.loads(entry.dataset.source)["digest"] == digest
    assert json.loads(entry.dataset.profile) == {"num_rows": 12}
    assert [t.value for t in entry.tags] == ["train"]
    assert run.data.tags["version.lightning-alignment"] == "0.1.0"
    assert "version.torch" in run.data.tags


def test_code_version_of_a_repository(tmp_path: Path) -> None:
    def git(*args: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert provenance.code_version(tmp_path) == {}
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    assert provenance.code_version(tmp_path) == {"git.commit": git("rev-parse", "HEAD"), "git.dirty": "false"}
    (tmp_path / "a").write_text("2")
    assert provenance.code_version(tmp_path)["git.dirty"] == "true"


def test_continuing_a_run_keeps_parameters_and_records_changes(logger: TrackingLogger) -> None:
    logger.log_hyperparams({"beta": 0.1, "lr": 1})
    logger.log_metrics({"loss": 2.0}, step=1)
    logger.finalize("failed")
    again = TrackingLogger(run_id=logger.run_id)
    again.log_hyperparams({"beta": 0.9, "lr": 1, "new": 3})
    again.log_metrics({"loss": 1.0}, step=2)
    again.finalize()
    assert (again.run_dir, again.turn) == (logger.run_dir, 1)
    run = again.experiment.get_run(logger.run_id)
    assert run.data.params == {"beta": "0.1", "lr": "1", "new": "3"}
    assert run.info.status == "FINISHED"
    assert [m.step for m in again.experiment.get_metric_history(logger.run_id, "loss")] == [1, 2]
    changes = again.experiment.download_artifacts(logger.run_id, "config/changed-1.json")
    assert json.loads(Path(changes).read_text()) == {"beta": ["0.1", "0.9"]}


def test_seeded_runs_have_names_of_their_own(workdir: Path) -> None:
    loggers = []
    for model in ("modules.SFT", "modules.DPO"):
        random.seed(0)  # as every run does
        logger = TrackingLogger()
        logger.annotate(model=model)
        logger.log_metrics({"loss": 1.0})
        logger.finalize()
        loggers.append(logger)
    names = [logger.experiment.get_run(logger.run_id).info.run_name for logger in loggers]
    assert [name.partition(" ")[0] for name in names] == ["SFT", "DPO"]


@pytest.mark.filterwarnings("ignore:.*refused a record")
def test_an_unknown_run_is_an_error(workdir: Path) -> None:
    with pytest.raises(ValueError, match="MLflow cannot continue run 'nope'"):
        TrackingLogger(run_id="nope").log_metrics({"loss": 1.0})


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "..", "a/b", "", "x" * 500, "ünï\ncode", ".hidden"])
def test_names_stay_inside(workdir: Path, name: str) -> None:
    folder = runs.run_folder(workdir, name, name)
    assert folder.parent.parent == workdir / "runs"
    assert folder.resolve() == folder
    assert len(folder.name) < 100
    assert runs.safe_name("a/b") != runs.safe_name("a_b")


def test_artifacts_stay_inside(logger: TrackingLogger) -> None:
    with pytest.raises(ValueError, match="leads out of the run folder"):
        logger.log_text("x", "../../evil.txt")


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    for at, name in [(2.0, "b"), (3.0, "c"), (1.0, "a")]:
        record = {"run_name": "x" if name != "c" else "y", "started": at}
        runs.write_record(runs.run_folder(tmp_path, "exp", name), record)
    (runs.run_folder(tmp_path, "exp", "broken")).mkdir()
    (runs.run_folder(tmp_path, "exp", "broken") / runs.RECORD).write_text("{")
    assert [f.name for f, _ in runs.find_runs(tmp_path, "exp")] == ["c", "b", "a"]
    assert [f.name for f, _ in runs.find_runs(tmp_path, "exp", run_name="x")] == ["b", "a"]
    assert list(runs.find_runs(tmp_path, "other")) == []


def test_evaluating_a_run_leaves_its_record_its_end_and_its_count_alone(logger: TrackingLogger) -> None:
    logger.annotate(model="modules.SFT", trains=True)
    logger.log_hyperparams({"beta": 0.1})
    logger.finalize("failed")
    record, before = runs.read_record(logger.run_dir), logger.experiment.get_run(logger.run_id)
    for turn in (1, 2):
        again = TrackingLogger(run_id=logger.run_id)
        again.annotate(model="modules.SFT", trains=False)
        again.log_hyperparams({"beta": 0.9})
        again.log_metrics({"val/loss": 1.0}, step=2)
        again.finalize()
        assert (again.run_dir, again.turn) == (logger.run_dir, turn)
    after = again.experiment.get_run(logger.run_id)
    assert runs.read_record(logger.run_dir) == record
    assert (after.info.status, after.info.end_time) == ("FAILED", before.info.end_time)
    assert after.data.tags == {**before.data.tags, "evaluations": "2"}
    assert after.data.metrics == {"val/loss": 1.0}
    assert [f.path for f in again.experiment.list_artifacts(logger.run_id, "config")] == [
        "config/changed-evaluation-1.json",
        "config/changed-evaluation-2.json",
    ]


def test_continuing_by_its_id_keeps_what_a_run_is_called(logger: TrackingLogger) -> None:
    logger.log_metrics({"loss": 1.0})
    logger.finalize()
    again = TrackingLogger(run_id=logger.run_id)
    again.log_metrics({"loss": 1.0})
    again.finalize()
    record = runs.read_record(logger.run_dir)
    assert record is not None
    assert record["run_name"] == "first"


# ---------------------------------------------------------------------- without MLflow


class _Failing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(500)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def tracker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a tracker that refuses, hangs, answers 500, has no folder, or whose database is locked."""
    kind = request.param
    if kind in ("refuses", "hangs"):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            if kind == "hangs":
                listening.listen(1)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    elif kind == "500":
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
    elif kind == "no folder":
        (tmp_path / "file").touch()
        yield f"sqlite:///{tmp_path}/file/mlflow.db"
    else:
        lock = sqlite3.connect(tmp_path / "mlflow.db")
        lock.execute("BEGIN EXCLUSIVE")
        yield f"sqlite:///{tmp_path}/mlflow.db"
        lock.close()


@pytest.mark.parametrize("tracker", ["refuses", "hangs", "500", "no folder", "locked"], indirect=True)
@pytest.mark.filterwarnings("ignore:MLflow at", "ignore:.*did not reach MLflow")
def test_a_dead_tracker_costs_a_second_and_raises_nothing(tracker: str, tmp_path: Path) -> None:
    import mlflow.tracking  # noqa: F401  # importing it is not the tracker's doing

    logger = TrackingLogger(root=str(tmp_path / "root"), tracking_uri=tracker)
    started = time.monotonic()
    logger.log_hyperparams({"a": 1})
    logger.log_text("a: 1\n", "config/fit.yaml")
    for step in range(200):
        logger.log_metrics({"loss": float(step)}, step=step)
    logger.experiment.log_text("ignored", "x", "y")
    logger.finalize()
    assert time.monotonic() - started < 2.0  # one second of waiting, and the disk
    assert logger.run_id is None
    lines = (logger.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["loss"] for x in lines] == [float(s) for s in range(200)]
    assert (logger.run_dir / "config" / "fit.yaml").is_file()


@pytest.mark.filterwarnings("ignore:MLflow at")
def test_what_was_missed_is_sent_when_the_tracker_is_back(workdir: Path) -> None:
    lock = sqlite3.connect("mlflow.db")
    lock.execute("BEGIN EXCLUSIVE")
    logger = TrackingLogger()
    for step in range(5):
        logger.log_metrics({"loss": float(step)}, step=step)
    assert logger.run_id is None
    assert str(logger.version).startswith("local-")
    lock.rollback()
    lock.close()
    deadline = time.monotonic() + 30
    while len(logger._outbox) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [m.step for m in logger.experiment.get_metric_history(logger.run_id, "loss")] == [0, 1, 2, 3, 4]


def test_a_full_disk_is_warned_about_once(logger: TrackingLogger, monkeypatch: pytest.MonkeyPatch) -> None:
    logger.log_metrics({"loss": 1.0}, step=1)
    folder = logger.run_dir

    def full(path: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "open", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        logger.log_metrics({"loss": 2.0}, step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({"loss": 3.0}, step=3)
    monkeypatch.undo()
    logger.finalize()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert [m.step for m in logger.experiment.get_metric_history(logger.run_id, "loss")] == [1, 2, 3]
