"""The callbacks of docs/multi_reward.md: its YAML through the command line, its table against the classes."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

import callbacks
from alignment.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "multi_reward.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Callbacks that watch several rewards")[1]
SHORT = ["--data.max_rows=8", "--data.max_eval_rows=2", "--data.batch_size=4", "--trainer.num_sanity_val_steps=0"]
SHORT += ["--model.completions=2", "--model.sampling.max_tokens=4", "--trainer.log_every_n_steps=1"]


@pytest.fixture
def folder(workdir: Path) -> Path:
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    for name, text in zip(("watch", "feedback"), re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL), strict=True):
        (workdir / f"{name}.yaml").write_text(text)
    return workdir


def logged(folder: Path) -> set[str]:
    lines = [line for file in folder.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    return {name for line in lines for name in json.loads(line)}


def test_all_of_them_in_one_run(folder: Path) -> None:
    words = ["fit", "-c", "configs/decoupled_po.yaml", "-c", "watch.yaml", *SHORT, "--trainer.max_steps=2"]
    assert main(words) == 0
    names = {"grad/dev/head/warm", "grad/factor/head/warm", "fusion/jitter", "fusion/entropy_coefficient", "val/reward"}
    assert names <= logged(folder)


def test_the_job_goes_on_from_a_trained_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["fit", "-c", "configs/decoupled_po.yaml", *SHORT, "--trainer.max_steps=1"]) == 0
    rows = [{"prompt": f"Is number {n} in stock?", "attribute": "warranty", "answer": "yes"} for n in range(3)]
    (folder / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["fit", "-c", "configs/decoupled_po.yaml", "-c", "feedback.yaml", "--ckpt_path=last", *SHORT]
    assert main([*words, "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]) == 0
    assert "the head of warm learns from rows 1 to 3 of feedback.jsonl" in caplog.text
    (events,) = (folder / "runs").rglob("events.txt")
    assert "online_head_update: the head of warm learns from rows 1 to 3" in events.read_text()
    assert "event/online_head_update" in logged(folder)


def test_the_table_names_every_setting() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*?) \|$", SECTION, flags=re.MULTILINE)
    assert len(rows) == 6
    for name, settings in rows:
        known = list(inspect.signature(getattr(callbacks, name)).parameters)
        assert re.findall(r"`(\w+)`", settings) == known, name


def test_the_numbers_of_the_table_are_the_defaults() -> None:
    defaults = {
        name: {p.name: p.default for p in inspect.signature(getattr(callbacks, name)).parameters.values()}
        for name in ("GradientNormRatio", "StalledHead", "FusionStability", "FocusReward", "RegressionGuard")
    }
    assert (defaults["GradientNormRatio"]["ema"], defaults["GradientNormRatio"]["control"]) == (0.9, False)
    assert list(defaults["StalledHead"].values()) == [10, 1e-8, 1.1, 2.0]
    assert (defaults["FusionStability"]["limit"], defaults["FusionStability"]["factor"]) == (0.1, 1.5)
    assert [defaults["FocusReward"][n] for n in ("evaluations", "steps", "share")] == [5, 50, 0.5]
    assert [defaults["RegressionGuard"][n] for n in ("share", "evaluations", "step")] == [0.9, 3, 0.01]
