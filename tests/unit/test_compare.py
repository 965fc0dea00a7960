"""`alignment compare`: what differs, and only that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from alignment.cli import main
from alignment.comparison import last_metrics, metric_rows, reply_rows, setting_rows
from alignment.diagnosis_source import Log, of_folder
from alignment.runs import run_folder, write_record


def run(name: str, beta: float, rows: list[dict[str, float]], replies: list[tuple[int, str, str]]) -> Path:
    folder = run_folder(Path("."), "e", name)
    write_record(folder, {"model": "modules.DPO", "run_name": name, "started": 1.0, "trains": True})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config").mkdir()
    config = {"model": {"init_args": {"beta": beta, "loss": "sigmoid", "stages": [{"steps": beta}]}}}
    config |= {"trainer": {"logger": {"save_dir": name}}}
    (folder / "config" / "fit.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": step, "index": i, "prompt": p, "completion": c} for i, (step, p, c) in enumerate(replies)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def logs(workdir: Path) -> list[Log]:
    first = run(
        "low", 0.1, [{"step": 1, "val/loss": 2.0, "train/loss": 1.0}, {"step": 2, "val/loss": 0.5}],
        [(1, "hi", "old"), (2, "hi", "hello [you]"), (2, "bye", "so long")],
    )  # fmt: skip
    second = run("high", 0.2, [{"step": 1, "val/loss": 0.75, "val/kl": 3.0}], [(1, "bye", "bye"), (1, "hi", "hey")])
    return [of_folder(first), of_folder(second)]


def test_settings(logs: list[Log]) -> None:
    """Neither what is equal nor where a run is kept."""
    assert setting_rows(logs) == [
        ("model.init_args.beta", ["0.1", "0.2"]),
        ("model.init_args.stages.0.steps", ["0.1", "0.2"]),
    ]


def test_metrics(logs: list[Log]) -> None:
    assert last_metrics(logs[0]) == {"val/loss": 0.5, "loss": 1.0}
    assert metric_rows(logs, ["val/*"]) == [("val/loss", [0.5, 0.75]), ("val/kl", [None, 3.0])]
    assert metric_rows(logs, ["los?"]) == [("loss", [1.0, None])]


def test_replies_of_the_last_evaluation(logs: list[Log]) -> None:
    assert reply_rows(logs, 5) == [("hi", ["hello [you]", "hey"]), ("bye", ["so long", "bye"])]
    assert reply_rows(logs, 1) == [("hi", ["hello [you]", "hey"])]


def test_the_command(logs: list[Log], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "low", "high"]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in ("model.init_args.beta", "0.75", "hello [you]", "val/kl"))
    assert "sigmoid" not in said


def test_mistakes(logs: list[Log], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "low"]) == 2
    assert "at least two runs" in capsys.readouterr().err
    assert main(["compare", "low", "none"]) == 2
    assert "no run 'none'" in capsys.readouterr().err
    assert main(["compare", "low", "high", "--metric", "x*"]) == 2
    assert "no run has logged a metric that matches x*" in capsys.readouterr().err
    for folder in Path("runs/e").iterdir():
        (folder / "samples.jsonl").unlink()
    assert main(["compare", "low", "high"]) == 0
    assert "no prompt has replies of all runs" in capsys.readouterr().out
