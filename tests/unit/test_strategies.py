"""Strategies by Lightning's names for them, refused before anything is built; files of a run given as a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, StrategyRegistry

from alignment.cli import main
from alignment.config_file import of_a_run
from alignment.errors import UserError
from alignment.strategies import check_trainer, refused
from tests.toys import trainer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
KNOWN = StrategyRegistry.available_strategies()
"""What `--trainer.strategy` may name."""


@pytest.mark.parametrize("name", [name for name in KNOWN if name.startswith(("deepspeed", "fsdp"))])
def test_strategies_that_keep_gradients_to_themselves(name: str) -> None:
    told = refused(name)
    assert told.startswith(f"trainer.strategy {name} is not supported: ")
    assert "configs/trainer/fsdp8.yaml" in told
    assert len(told) < 400


def test_there_are_such_strategies() -> None:
    assert {"deepspeed_stage_2", "deepspeed_stage_3", "fsdp"} <= set(KNOWN)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("auto", False),
        ("ddp", False),
        ("ddp_find_unused_parameters_true", False),
        ("lightning.pytorch.strategies.ModelParallelStrategy", False),
        ("lightning.pytorch.strategies.DeepSpeedStrategy", True),
        ("lightning.pytorch.strategies.FSDPStrategy", True),
        ("FSDPStrategy", True),
        ("mine.FSDPOfMyOwn", False),
    ],
)
def test_by_name_and_by_class(name: str, told: bool) -> None:
    assert bool(refused(name)) == told


@pytest.mark.parametrize(
    "strategy",
    ["deepspeed_stage_2", "fsdp", "{class_path: lightning.pytorch.strategies.DeepSpeedStrategy}"],
)
def test_the_command_line_says_so_before_anything_is_built(
    strategy: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the package is missing, without which Lightning would not build it."""
    assert main(["fit", "-c", str(CONFIGS / "dpo.yaml"), f"--trainer.strategy={strategy}"]) != 0
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "is not supported: " in line
    assert "configs/trainer/fsdp8.yaml" in line


def test_a_trainer_of_ones_own(tmp_path: Path) -> None:
    """Lightning itself refuses FSDP1 on a CPU; on a GPU the module does."""
    with pytest.raises(ValueError, match="FSDP"):
        trainer(tmp_path, strategy="fsdp")
    run: Any = SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy), precision="32-true")
    with pytest.raises(UserError, match=r"FSDPStrategy is not supported: FSDP1 finishes gradients"):
        check_trainer(run)


@pytest.mark.parametrize("name", ["ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false"])
def test_ddp_by_its_names(name: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, strategy=name, devices=2)
    assert isinstance(run.strategy, DDPStrategy)
    check_trainer(run)


# ---------------------------------------------------------------------- files that set more than a trainer


WHOLE = [str(CONFIGS / "trainer" / name) for name in ("fsdp8.yaml", "tp2.yaml")]


@pytest.mark.parametrize("file", WHOLE)
def test_a_file_of_a_run_given_as_a_trainer(file: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes to the same."""
    found: list[Any] = []
    for words in (["-c", file], ["--trainer", file] if "tp2" in file else [f"--trainer={file}"]):
        assert main(["fit", "-c", str(CONFIGS / "dpo.yaml"), *words, "--print_config"]) == 0
        found.append(yaml.safe_load(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["trainer"]["callbacks"][-1]["class_path"] == "callbacks.FSDP2"


def test_words_that_stay(tmp_path: Path) -> None:
    plain, broken = tmp_path / "plain.yaml", tmp_path / "broken.yaml"
    plain.write_text("max_steps: 3\n")
    broken.write_text("trainer: [\n")
    for words in (
        ["fit", "--trainer", str(plain)],
        ["fit", "--trainer", str(broken)],
        ["fit", f"--trainer={tmp_path / 'missing.yaml'}"],
        ["fit", "--trainer={max_steps: 3}"],
        ["fit", "--trainer"],
        ["fit", "--trainer.max_steps", WHOLE[0]],
        ["fit", "--data", WHOLE[0]],
    ):
        assert of_a_run(words) == words
