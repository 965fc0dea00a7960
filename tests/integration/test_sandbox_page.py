"""docs/sandbox.md: its commands run, its code does what it says, its tables name what there is; the fragments of code
rewards run as their comments say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.cli import main
from alignment.rewards.code_cases import cases_of
from alignment.sandbox import Limits
from alignment.sandbox_command import ENVIRONMENT
from benchmarks.sandbox.benign import BENIGN
from benchmarks.sandbox.escapes import ESCAPES
from benchmarks.sandbox.forgeries import FORGERIES
from benchmarks.sandbox.layers import MISSING, without_bubblewrap
from tests.sandboxes import need_sandbox

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "sandbox.md").read_text(encoding="utf-8")
FRAGMENTS = sorted((REPOSITORY / "configs" / "rewards" / "code").glob("*.yaml"))
SMALL = ["--data.max_rows=8", "--data.val_fraction=0.3", "--data.batch_size=4", "--trainer.max_steps=1"]
SMALL += ["--model.completions=2", "--model.sampling.max_tokens=4", "--trainer.limit_val_batches=1"]
SMALL += ["--trainer.num_sanity_val_steps=0", "--trainer.enable_model_summary=false", "--trainer.log_every_n_steps=1"]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)


def logged(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for file in folder.rglob("metrics.jsonl"):
        for line in file.read_text().splitlines():
            metrics |= json.loads(line)
    return metrics


@pytest.fixture
def folder(workdir: Path) -> Path:
    need_sandbox()
    pytest.importorskip("flake8")
    pytest.importorskip("bandit")
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    return workdir


@pytest.mark.slow
def test_commands(folder: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert main([*shlex.split(line)[1:], *SMALL]) == 0, line
    metrics = logged(folder)
    for name in ("compiles", "passed", "fast", "style", "secure"):
        assert metrics[f"rewards/{name}/mean"] == 0  # the tiny model writes no code
        assert metrics[f"rewards/{name}/abstained"] == 0


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_fragments(path: Path, folder: Path) -> None:
    (line,) = re.findall(r"^# Use: (alignment .*)$", path.read_text(), flags=re.MULTILINE)
    assert f"configs/rewards/code/{path.name}" in line
    (name,) = yaml.safe_load(path.read_text())["model"]["init_args"]["rewards"]
    assert main([*shlex.split(line)[1:], *SMALL]) == 0
    assert logged(folder)[f"rewards/{name}/faults"] == 0


def test_solutions_to_train_on(folder: Path) -> None:
    (flags,) = re.findall(r"`(--model\s+modules.SFT .*?)`", PAGE, flags=re.DOTALL)
    words = ["--data.max_rows=8", "--trainer.max_steps=1", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    assert main(["fit", *shlex.split(flags), *words]) == 0


def test_the_code_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(code, {})
    assert capsys.readouterr().out == "5\n\n"


def test_the_rows_of_the_page() -> None:
    (text,) = blocks("json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [len(cases_of(row["tests"], row.get("function"))) for row in rows] == [1, 1]


def test_the_figures_of_the_page() -> None:
    for field in fields(Limits):
        assert f"`{field.name}` ({field.default:g})" in PAGE
    assert len(ENVIRONMENT) + 1 == 8  # and PWD
    words = {8: "eight", 10: "ten"}
    assert f"{words[8]} fixed variables" in PAGE
    assert f"lets {len(FORGERIES) + len(ESCAPES)} programs attack it, {len(BENIGN)} ordinary ones run" in PAGE
    assert f"takes away {words[len(MISSING)]} of\nits layers" in PAGE
    assert len(FRAGMENTS) == 5


def test_a_run_without_the_sandbox_ends_before_it_begins(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with without_bubblewrap(tmp_path / "empty"):
        assert main(["fit", "-c", "configs/code_generation.yaml", *SMALL]) == 2
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if "cannot be loaded" in line]
    assert "bwrap is missing" in line
    assert "apt-get install bubblewrap" in line
    assert "Traceback" not in said
