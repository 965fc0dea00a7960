"""The table of samples: which rows, where they go, and what a resumed run, a dead tracker or a full disk does to it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from mlflow.tracking import MlflowClient

from alignment.errors import UserError
from alignment.tracking import TrackingLogger
from benchmarks.ports import meeting_port
from callbacks import Checkpoint, Samples
from callbacks.samples import _log_table, _read
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader
from tests.loops import Recorder, loaders
from tests.toys import trainer

COLUMNS = ["step", "index", "stratum", "prompt", "completion", "reward", "rewards/long", "rewards/right", "truncated"]


class Speaker(Recorder):
    """Answers each prompt with its own number and the number of updates so far; even prompts come truncated."""

    def __init__(self, voice: str = "") -> None:
        super().__init__()
        self.voice = voice

    def answer(self, index: int) -> dict[str, Any]:
        rewards = {"long": index / 3, "right": None if index == 1 else 1.0}
        text = {"prompt": f"prompt {index}", "completion": f"{self.voice}{index} at {self.trainer.global_step}"}
        rest = {"reward": 0.5, "rewards": rewards, "truncated": index % 2 == 0}
        return {"index": index, "stratum": "easy", **text, **rest}

    def validation_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:  # type: ignore[override]
        super().validation_step(batch, batch_idx)
        return [self.answer(index) for index in batch.group_index.tolist()]

    def test_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        return [self.answer(100 + index) for index in batch.group_index.tolist()]


def fit(folder: Path, samples: Samples, *others: L.Callback, module: L.LightningModule | None = None, **settings: Any):
    """Two epochs of six batches with a validation of prompts 0 to 3 behind each: metrics stand at steps 5 and 11."""
    ckpt_path = settings.pop("ckpt_path", None)
    kept = any(isinstance(c, Checkpoint) for c in others)
    run = trainer(folder, callbacks=[samples, *others], enable_checkpointing=kept, **{"max_epochs": 2, **settings})
    module = Speaker() if module is None else module
    run.fit(module, *loaders(), ckpt_path=ckpt_path)
    return run


def line(step: int, index: int, completion: str) -> dict[str, Any]:
    """By hand: 1/3 with six digits, the abstention of prompt 1."""
    long = [0.0, 0.333333, 0.666667, 1.0][index]
    right = None if index == 1 else 1.0
    return {
        **{"step": step, "index": index, "stratum": "easy", "prompt": f"prompt {index}", "completion": completion},
        **{"reward": 0.5, "rewards/long": long, "rewards/right": right, "truncated": index in (0, 2)},
    }


EXPECTED = [line(5, i, f"{i} at 6") for i in range(3)] + [line(11, i, f"{i} at 12") for i in range(3)]


def test_the_first_prompts_of_every_evaluation(tmp_path: Path) -> None:
    fit(tmp_path, Samples(rows=3))  # with a sanity check, which is no evaluation
    rows = _read(tmp_path / "samples.jsonl")
    assert rows == EXPECTED
    assert list(rows[0]) == COLUMNS
    assert [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]


def test_the_table_in_mlflow(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = TrackingLogger(run_name="speaks")
    fit(workdir, Samples(rows=3), logger=logger)
    assert _read(logger.run_dir / "samples.jsonl") == EXPECTED
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    text = Path(client.download_artifacts(logger.run_id, "samples.json")).read_text()
    assert json.loads(text) == {"columns": COLUMNS, "data": [list(row.values()) for row in EXPECTED]}
    # What a user's notebook does.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir}/mlflow.db")
    table = client.load_table(logger.experiment_id, "samples.json", run_ids=[logger.run_id])
    assert table["completion"].tolist() == [row["completion"] for row in EXPECTED]
    assert table["rewards/right"].isna().tolist() == [False, True, False] * 2
    # A row is found from a point of a curve.
    assert [point.step for point in client.get_metric_history(logger.run_id, "val")] == [5, 11]


def test_a_resumed_run_replaces_what_it_evaluates_again(workdir: Path) -> None:
    logger = TrackingLogger()
    keep = Checkpoint(dirpath=workdir / "checkpoints", every_n_train_steps=8, save_top_k=-1)
    fit(workdir, Samples(rows=3), keep, logger=logger)
    (saved,) = (p for p in (workdir / "checkpoints").iterdir() if "step=8" in p.name)
    again = TrackingLogger(run_id=logger.run_id)
    fit(workdir, Samples(rows=2), module=Speaker("again "), logger=again, ckpt_path=saved)
    expected = EXPECTED[:3] + [line(11, i, f"again {i} at 12") for i in range(2)]
    assert _read(again.run_dir / "samples.jsonl") == expected
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    table = json.loads(Path(client.download_artifacts(logger.run_id, "samples.json")).read_text())
    assert table == {"columns": COLUMNS, "data": [list(row.values()) for row in expected]}


def test_a_call_that_the_tracker_gets_twice_counts_once(workdir: Path) -> None:
    logger = TrackingLogger()
    path = logger.run_dir / "samples.jsonl"
    one, two = [line(1, 0, "a")], [{**line(2, 0, "b"), "rewards/new": 2.0}]
    for rows in (one, one, two, two):
        logger.record(lambda client, run_id, rows=rows: _log_table(client, run_id, path, rows))
    logger.finalize()
    client = logger.experiment
    table = json.loads(Path(client.download_artifacts(logger.run_id, "samples.json")).read_text())
    assert table["columns"] == [*COLUMNS[:-1], "rewards/new", "truncated"]
    assert [(row[0], row[4], row[-2]) for row in table["data"]] == [(1, "a", None), (2, "b", 2.0)]
    tag = client.get_run(logger.run_id).data.tags["mlflow.loggedArtifacts"]
    assert json.loads(tag) == [{"path": "samples.json", "type": "table"}]


def test_half_an_artifact_is_made_anew_from_the_file(workdir: Path) -> None:
    logger = TrackingLogger()
    fit(workdir, Samples(rows=3), logger=logger)
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    client.log_text(logger.run_id, '{"columns": ["st', "samples.json")
    _log_table(client, logger.run_id, logger.run_dir / "samples.jsonl", [line(17, 0, "0 at 18")])
    table = json.loads(Path(client.download_artifacts(logger.run_id, "samples.json")).read_text())
    assert [row[0] for row in table["data"]] == [5, 5, 5, 11, 11, 11, 17]


def test_the_test_split_has_a_table_of_its_own(tmp_path: Path) -> None:
    run = fit(tmp_path, Samples(rows=3))
    run.test(run.lightning_module, loaders()[1], verbose=False)
    assert _read(tmp_path / "samples.jsonl") == EXPECTED
    rows = _read(tmp_path / "test_samples.jsonl")
    assert [(row["index"], row["completion"]) for row in rows] == [(i, f"{i} at 12") for i in (100, 101, 102)]


class Odd(Speaker):
    def answer(self, index: int) -> dict[str, Any]:
        text = {"prompt": "two\nlines", "completion": "line\u2028separator 语言 🙂 \ud800"}
        return {"index": index, "stratum": "", **text, "tokens": 7, "reward": math.nan, "rewards": {"wild": math.inf}}


def test_odd_texts_and_values(workdir: Path) -> None:
    logger = TrackingLogger()
    fit(workdir, Samples(rows=1), module=Odd(), logger=logger, max_epochs=1)
    text = {"prompt": "two\nlines", "completion": "line\u2028separator 语言 🙂 ?"}
    rest = {"tokens": 7, "reward": None, "rewards/wild": None, "truncated": None}
    expected = {"step": 5, "index": 0, **text, **rest}
    assert _read(logger.run_dir / "samples.jsonl") == [expected]
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    table = json.loads(Path(client.download_artifacts(logger.run_id, "samples.json")).read_text())
    assert table["columns"] == list(expected)
    assert [v for c, v in zip(table["columns"], table["data"][0], strict=True) if c != "completion"] == [
        v for c, v in expected.items() if c != "completion"
    ]


@pytest.mark.parametrize("outputs", [None, {"loss": 1.0}, [1.0], [{"index": 0}]], ids=str)
def test_modules_that_return_no_rows_are_named_once(outputs: Any, tmp_path: Path) -> None:
    class Silent(Recorder):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return outputs

    with pytest.warns(UserWarning, match="validation_step of Silent returns no rows") as caught:
        fit(tmp_path, Samples(), module=Silent())
    assert len([w for w in caught if "callbacks.Samples" in str(w.message)]) == 1
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, Samples(), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_rows_is_checked() -> None:
    with pytest.raises(UserError, match="rows is 0; use at least 1"):
        Samples(rows=0)


# ---------------------------------------------------------------------- what may fail


@pytest.mark.filterwarnings("ignore:.*(is away|did not reach MLflow)")
def test_a_dead_tracker_does_not_matter(workdir: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))  # and never listens: connections are refused
        logger = TrackingLogger(tracking_uri=f"http://127.0.0.1:{listening.getsockname()[1]}")
        fit(workdir, Samples(rows=3), logger=logger)
        assert _read(logger.run_dir / "samples.jsonl") == EXPECTED


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("callbacks.samples.os.replace", full)
    with pytest.warns(UserWarning, match="cannot write .*No space left on device"):
        fit(tmp_path, Samples(rows=3))


def test_a_file_that_somebody_broke_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1')
    with pytest.warns(UserWarning, match="cannot write .*samples.jsonl"):
        fit(tmp_path, Samples(rows=3))
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1'


# ---------------------------------------------------------------------- two processes


def one_of_two(rank: int, port: int, folder: Path) -> None:
    """Prompts 0 to 4, dealt out: rank 0 has 0, 2, 4, rank 1 has 1, 3 and in the last batch none."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    order = BatchOrder(SampleOrder(5, shuffle=False), batch_size=2, rank=rank, world_size=2)
    loader = StatefulLoader(list(loaders()[0]._data)[:5], order)
    logger = TrackingLogger(root=str(folder))
    run = trainer(folder, devices=2, strategy="ddp", logger=logger, callbacks=[Samples(rows=4)])
    run.validate(Speaker(), loader, verbose=False)
    if rank == 0:
        (folder / "run.txt").write_text(f"{logger.run_id} {logger.run_dir}")


@pytest.mark.slow
def test_two_processes_write_one_table(workdir: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    port = meeting_port()
    ranks = [spawn.Process(target=one_of_two, args=(rank, port, workdir)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout=300)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    run_id, run_dir = (workdir / "run.txt").read_text().split()
    expected = [line(0, index, f"{index} at 0") for index in range(4)]
    assert _read(Path(run_dir) / "validate_samples.jsonl") == expected
    table = MlflowClient(f"sqlite:///{workdir}/mlflow.db").download_artifacts(run_id, "validate_samples.json")
    assert json.loads(Path(table).read_text())["data"] == [list(row.values()) for row in expected]
