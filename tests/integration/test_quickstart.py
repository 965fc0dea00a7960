"""The quickstart end to end on the model that needs no download, smaller than `make quickstart MODEL=tiny`."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment import quickstart
from alignment.quickstart_report import COLUMNS, Report

PROMPTS = 16


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, Report]:
    root = tmp_path_factory.mktemp("quickstart")
    arguments = ["--model", "tiny", "--root", str(root), "--rows", "768", "--prompts", str(PROMPTS)]
    assert quickstart.main([*arguments, "--figure", str(root / "picture.png")]) == 0
    (summary,) = root.glob("runs/quickstart/*/quickstart.json")
    return root, Report.from_json(summary.read_text())


@pytest.mark.slow
def test_every_number_is_there_and_finite(done):
    _, report = done
    assert tuple(report.scores) == COLUMNS
    for score in report.scores.values():
        assert all(math.isfinite(value) for value in score.numbers.values())
        assert len(score.replies) == PROMPTS
        assert 0 < score.length <= 48


@pytest.mark.slow
def test_before_training_nothing_differs_from_the_start(done):
    before = done[1].scores["before"]
    assert (before.preference_accuracy, before.reward_margin, before.kl) == (0.5, 0.0, 0.0)


@pytest.mark.slow
def test_training_moves_the_policy_and_dpo_gains_preference(done):
    _, report = done
    assert report.scores["SFT"].kl > 0.1
    assert report.scores["DPO"].preference_accuracy > 0.6
    assert report.scores["DPO"].reward_margin > 0.0


@pytest.mark.slow
def test_what_it_leaves_behind(done):
    root, report = done
    assert (root / "picture.png").stat().st_size > 5_000
    (page,) = root.glob("runs/quickstart/*/quickstart.md")
    accuracy = report.scores["SFT"].preference_accuracy
    assert f"| preference accuracy, against the column before | 50% | {accuracy:.0%} |" in page.read_text()
    for stage in ("sft", "dpo"):
        folder = root / "models" / "quickstart-tiny" / stage
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 200_000
        assert AutoTokenizer.from_pretrained(folder).chat_template
    with sqlite3.connect(root / "mlflow.db") as database:
        steps = database.execute("select step from metrics where key = 'heldout/right' order by step").fetchall()
        names = {name for (name,) in database.execute("select name from runs")}
    assert steps == [(0,), (1,), (2,)]
    assert {"sft_tiny", "dpo_tiny", "before-after-tiny"} <= names
    (replies,) = root.glob("artifacts/**/replies.json")
    assert "before" in json.loads(replies.read_text())["columns"]


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert quickstart.main(["--model", str(tmp_path / "nothing"), "--root", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("quickstart: ")


def test_what_to_type_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`make quickstart` runs in a shell without the environment's commands: then they are put on its PATH first."""
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "activate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python"))
    for path, first in (("/usr/bin", [".", ".venv/bin/activate"]), (f"/usr/bin:{bin_folder}", None)):
        monkeypatch.setenv("PATH", path)
        quickstart.show_next(Path("numbers.json"), "models/dpo", Path("."), "quickstart", Console(width=80))
        lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
        assert lines["try it"].split() == ["transformers", "chat", "models/dpo"]
        assert (lines["first"].split()[:2] if "first" in lines else None) == first
