"""The callbacks of docs/multi_reward.md: its YAML through the command line, its table against the classes."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import callbacks
from alignment.cli import main
from alignment.tiny import save_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "multi_reward.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Callbacks that watch several rewards")[1]
SHORT = ["--data.max_rows=8", "--data.max_eval_rows=2", "--data.batch_size=4", "--trainer.num_sanity_val_steps=0"]
SHORT += ["--model.completions=2", "--model.sampling.max_tokens=4", "--trainer.log_every_n_steps=1"]

NAMES = ("right", "warm", "short")
VARIED = f"--model.rewards={{{', '.join(f'{name}: varied.{name}' for name in NAMES)}}}"
"""Rewards that tell any two texts apart, as those of the built-in questions do not on four tokens."""


@pytest.fixture
def folder(workdir: Path) -> Path:
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    texts = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    for name, text in zip(("watch", "watch_plain", "feedback"), texts, strict=True):
        (workdir / f"{name}.yaml").write_text(text)
    (dial,) = re.findall(r"```yaml\n(# dial\.yaml\n.*?)```", PAGE, re.DOTALL)
    (workdir / "dial.yaml").write_text(dial)
    save_tiny(workdir / "models" / "mine")
    form = "def {}(completion):\n    return sum(map(ord, completion)) % {} / 9\n"
    (workdir / "varied.py").write_text("".join(form.format(*part) for part in zip(NAMES, (5, 7, 9), strict=True)))
    return workdir


def logged(folder: Path) -> set[str]:
    lines = [line for file in folder.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    return {name for line in lines for name in json.loads(line)}


def test_all_of_them_in_one_run(folder: Path) -> None:
    words = ["fit", "-c", "configs/decoupled_po.yaml", "-c", "watch.yaml", *SHORT, VARIED, "--trainer.max_steps=2"]
    assert main(words) == 0
    names = {"grad/dev/head/warm", "grad/factor/head/warm", "fusion/jitter", "fusion/entropy_coefficient", "val/reward"}
    assert names <= logged(folder)


@pytest.mark.slow
def test_commands(folder: Path) -> None:
    """Those of the page, made short."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line.split("  #")[0])[1:]
        assert main([*words, *SHORT, "--trainer.max_steps=2"]) == 0, line
    assert list(folder.rglob("dial.png"))


@pytest.mark.parametrize(("config", "logged_too"), [("morl", "grad/dev/warm"), ("gdpo", "grad/dev/matrices")])
def test_what_serves_modules_without_heads(config: str, logged_too: str, folder: Path) -> None:
    words = ["fit", "-c", f"configs/{config}.yaml", "-c", "watch_plain.yaml", *SHORT, VARIED, "--trainer.max_steps=2"]
    assert main([*words, "--trainer.val_check_interval=1"]) == 0
    assert {logged_too, "val/reward"} <= logged(folder)


@pytest.mark.parametrize("config", ["morl", "gdpo"])
def test_the_list_for_heads_is_refused_elsewhere(config: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-c", f"configs/{config}.yaml", "-c", "configs/callbacks/several_rewards.yaml"]
    assert main(["fit", *words, *SHORT, "--trainer.max_steps=1"]) == 2
    assert "isolation" in capsys.readouterr().err


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
