"""The commands of docs/tune.md, in their order, made short; the ready spaces fit the configurations they name."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from alignment.cli import main
from alignment.tuning.process import resolved
from alignment.tuning.space import read
from tests.integration.test_docs import SMALL, commands

REPOSITORY = Path(__file__).resolve().parents[2]
SPACES = sorted((REPOSITORY / "configs" / "tune").glob("*.yaml"))


def test_commands(workdir: Path) -> None:
    """The first search and what it leaves; the other lines are the same command with settings that tests have."""
    pytest.importorskip("optuna")
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    lines = commands("tune.md")
    assert [line.split()[1] for line in lines] == ["tune", "fit", "tune", "tune"]
    epoch = ["--data.max_rows=4", "--data.max_eval_rows=4", "--data.batch_size=4", "--trainer.accelerator=cpu"]
    assert main([*shlex.split(lines[0].replace("--trials 3", "--trials 1"))[1:], *epoch]) == 0
    assert main([*shlex.split(lines[1])[1:], *SMALL]) == 0
    for line in lines[2:]:
        assert Path(re.findall(r"--space (\S+)", line)[0]).is_file()


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_ready_spaces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the configuration in their comment."""
    monkeypatch.chdir(REPOSITORY)
    (config,) = set(re.findall(r"-c (\S+)", path.read_text()))
    assert read([path], resolved(["-c", config])).keys() == yaml.safe_load(path.read_text()).keys()
