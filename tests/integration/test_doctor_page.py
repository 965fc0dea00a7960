"""What docs/doctor.md shows works as shown, and what it names is there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.cli import main
from alignment.diagnosis_rules import NAMES, RULES
from tests.integration.test_docs import EPOCH, REPOSITORY, SHORT, SMALL, blocks, commands, folder
from tests.unit.test_diagnosis import sampled
from tests.unit.test_diagnosis_source import tracked

__all__ = ["folder"]
PAGE = (REPOSITORY / "docs" / "doctor.md").read_text(encoding="utf-8")
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


def test_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, *doctor = commands("doctor.md")
    words = [*shlex.split(fit)[1:], *SMALL, *SHORT, *EPOCH, *QUIET, "--trainer.logger.run_name=my-run"]
    assert main(words) == 0
    _, address = tracked("trl-grpo", sampled())
    assert address.endswith("mlflow.db")
    capsys.readouterr()
    for line in doctor:
        words = [address if word == "sqlite:///trl.db" else word for word in shlex.split(line)[1:]]
        assert main(words) == 0, line
        assert ": no alarm\n" in capsys.readouterr().out
    (report,) = (folder / "runs").rglob("doctor.txt")
    assert "1 training rows" in report.read_text()


def test_configurations(folder: Path) -> None:
    """A held-out reward beside those of the run, and actions upon a coefficient that they can move."""
    held_out, actions = blocks("doctor.md", "yaml")
    Path("held_out.yaml").write_text(held_out)
    Path("actions.yaml").write_text(actions)
    words = ["fit", "-c", "configs/grpo.yaml", "-c", "held_out.yaml", "-c", "actions.yaml"]
    words += ["--model.kl.coefficient=0.05", "--trainer.log_every_n_steps=1", *SMALL, *SHORT, *QUIET]
    assert main(words) == 0
    logged = [json.loads(x) for x in next(folder.rglob("metrics.jsonl")).read_text().splitlines()]
    names = {name for row in logged for name in row}
    assert {"rewards/fresh/mean", "schedule/kl.coefficient", "schedule/entropy.coefficient"} <= names


def test_the_table_has_every_rule_and_its_first_setting() -> None:
    found = re.findall(r"^\| `(\w+)` \|.*\| `([\w.]+)` \|$", PAGE, flags=re.MULTILINE)
    assert found == [(rule.name, rule.settings[0].key) for rule in RULES]
    assert [name for name, _ in found] == list(NAMES)


def keys(config: Any, prefix: str = "") -> set[str]:
    found = {prefix.rstrip(".")}
    if isinstance(config, dict):
        config = {**config, **config.get("init_args", {})} if isinstance(config.get("init_args"), dict) else config
        for name, value in config.items():
            found |= keys(value, f"{prefix}{name}.")
    return found


def test_settings_that_rules_name_exist(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known: set[str] = set()
    for name in ("grpo", "ppo", "dpo"):
        capsys.readouterr()
        assert main(["fit", "-c", f"configs/{name}.yaml", "--print_config"]) == 0
        known |= keys(yaml.safe_load(capsys.readouterr().out))
    named = {setting.key for rule in RULES for setting in rule.settings}
    named |= {key for rule in RULES for s in rule.settings for key in re.findall(r"\bmodel\.[\w.]+\w", s.how)}
    assert named <= known, named - known
