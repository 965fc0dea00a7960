"""R10 and R11: no attack on the sandbox gets anything, no forgery scores, every benign program runs, and without one of
its layers nothing does. The programs are in `benchmarks.sandbox`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.rewards import RewardSuite
from alignment.rewards.code import UnitTests
from benchmarks.sandbox import trials
from benchmarks.sandbox.benign import BENIGN
from benchmarks.sandbox.escapes import ESCAPES
from benchmarks.sandbox.forgeries import FORGERIES, SECRET
from benchmarks.sandbox.layers import MISSING, refusal, without_bubblewrap
from tests.sandboxes import need_sandbox


@pytest.fixture(autouse=True)
def _sandbox() -> None:
    need_sandbox()


def test_there_are_as_many_as_planned() -> None:
    assert len(FORGERIES) + len(ESCAPES) >= 40
    assert len(BENIGN) >= 30
    assert len(MISSING) >= 6


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_scores_nothing(name: str) -> None:
    assert trials.forged(name) == ""


def test_the_task_of_the_forgeries_can_be_solved() -> None:
    """By who knows the answer: they do not fail because everything does."""
    assert trials.verdict(UnitTests(), f"def secret(x):\n    return '{SECRET}'") == 1.0


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_escapes(name: str, tmp_path: Path) -> None:
    assert trials.escaped(name, tmp_path) == ""


OUTSIDE = ("starts programs", "reads the host", "links to the host", "reads the environment")


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_the_sandbox_they_do_escape(name: str, tmp_path: Path) -> None:
    """So that what they print inside means something. These do no harm."""
    (tmp_path / "canary").write_text("of the host")
    text = ESCAPES[name].program.replace("/tmp/", f"{tmp_path}/").replace("CANARY", str(tmp_path / "canary"))
    environment = {**os.environ, trials.MARK: "secret"}
    line = [sys.executable, "-c", text]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert "ESCAPED" in done.stdout


@pytest.mark.parametrize("name", BENIGN)
def test_a_benign_program_runs(name: str) -> None:
    assert trials.benign(name) == ""


@pytest.mark.parametrize("layer", MISSING)
def test_without_a_layer_nothing_runs(layer: str, tmp_path: Path) -> None:
    assert refusal(layer, tmp_path) == ""


def test_a_run_whose_rewards_need_the_sandbox_does_not_start_without_it(tmp_path: Path) -> None:
    with without_bubblewrap(tmp_path), RewardSuite({"passed": {"reward": "UnitTests"}}) as suite:
        with pytest.raises(UserError, match=r"'passed' cannot be loaded: bwrap is missing.*apt-get install bubblewrap"):
            suite.start()
