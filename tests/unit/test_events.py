"""Events: the log, a mark beside the curves, and a page that a user reads in MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from mlflow.tracking import MlflowClient

from alignment.events import record_event
from alignment.tracking import TrackingLogger
from tests.callback_toys import Trained
from tests.loops import Recorder, loaders
from tests.toys import trainer


class Tells(L.Callback):
    """Something happens at every third batch."""

    def __init__(self, text: str = "it was so") -> None:
        self.text = text

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            record_event(trainer, "omen", f"{self.text} at batch {batch_idx}")


def run(folder: Path, logger: Any, *callbacks: L.Callback) -> None:
    trainer(folder, callbacks=list(callbacks), logger=logger, max_epochs=1).fit(Recorder(), *loaders())


def test_log_metric_and_page(workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = TrackingLogger()
    run(workdir, logger, Tells())
    logger.finalize("success")
    page = "step 2  omen: it was so at batch 2\nstep 5  omen: it was so at batch 5\n"
    assert (logger.run_dir / "events.txt").read_text() == page
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    assert Path(client.download_artifacts(logger.run_id, "events.txt")).read_text() == page
    marks = client.get_metric_history(logger.run_id, "event/omen")
    assert [(mark.step, mark.value) for mark in marks] == [(2, 1.0), (5, 1.0)]
    lines = [json.loads(line) for line in (logger.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "event/omen" in line] == [2, 5]
    assert "omen at step 2: it was so at batch 2" in caplog.text


def test_a_resumed_run_adds_what_is_new(workdir: Path) -> None:
    logger = TrackingLogger()
    run(workdir, logger, Tells())
    again = TrackingLogger(run_id=logger.run_id)
    run(workdir, again, Tells(), Tells("and so"))
    lines = (logger.run_dir / "events.txt").read_text().splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        *("it was so at batch 2", "it was so at batch 5", "and so at batch 2", "and so at batch 5"),
    ]


def test_two_heads_at_one_step(workdir: Path) -> None:
    """MLflow gets the same mark twice, which it takes for one."""
    logger = TrackingLogger()
    run(workdir, logger, Tells("one"), Tells("two"))
    logger.finalize("success")
    assert len((logger.run_dir / "events.txt").read_text().splitlines()) == 4
    marks = MlflowClient(f"sqlite:///{workdir}/mlflow.db").get_metric_history(logger.run_id, "event/omen")
    assert {mark.step for mark in marks} == {2, 5}


def test_without_a_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, False, Tells())
    assert "omen at step 2" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    other = Trained()
    other.is_global_zero = False
    record_event(other, "omen", "it was so")
    assert other.events == []
    assert "omen" not in caplog.text
