"""docs/preferences.md: its commands, in their order, made short; its tables against what there is."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
from pathlib import Path

import pytest

import modules
from alignment.cli import main
from alignment.losses import DPO_LOSSES
from alignment.pair_objective import PairObjective

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "preferences.md").read_text(encoding="utf-8")
FIT = ["--data.max_rows=8", "--data.max_eval_rows=4", "--data.batch_size=4", "--trainer.max_steps=1"]
FIT += ["--trainer.num_sanity_val_steps=0", "--trainer.enable_model_summary=false"]


@pytest.mark.slow
def test_commands(workdir: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 9
    for line in lines:
        assert main([*shlex.split(line)[1:], *FIT]) == 0, line


KNOWN = {name for name, entry in DPO_LOSSES.items() if entry.reference} - {"sft"}


def table_of(text: str) -> list[list[str]]:
    """The cells of the rows of the first table, without its head."""
    lines = [line for line in text.split("\n- ")[0].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_table_of_losses() -> None:
    """All that compare with a reference, each with its defaults and its preset where it has one."""
    found = table_of(PAGE.split("## Losses of DPO")[1])
    assert {name for row in found for name in names_in(row[0])} == KNOWN
    for losses, value, beta, preset, _ in found:
        smoothing, tau = (re.findall(rf"`{name}` ([\d.]+)", value) for name in ("label_smoothing", "tau"))
        for name in names_in(losses):
            objective = PairObjective(name, margins={"other": 0.5} if name == "modpo" else {})
            assert objective.beta == float(beta), name
            assert objective.label_smoothing == float(smoothing[0] if smoothing else 0.0), name
            settings = inspect.signature(DPO_LOSSES[name].fn).parameters
            assert [settings[s].default for s in ("tau",) if s in settings] == [float(t) for t in tau]
        for name in names_in(preset):
            assert (REPOSITORY / "configs" / "presets" / f"{name}.yaml").is_file()


def test_every_default_has_its_source() -> None:
    found = table_of(PAGE.split("Where the defaults are from:")[1])
    assert {name for row in found for name in names_in(row[0])} == KNOWN
    assert all(re.search(r"\d{4}\.\d{5}", row[1]) for row in found)


def test_the_losses_of_differences() -> None:
    (listed,) = re.findall(r"what the prompt alone decides cancels:\s+(.*?)\. `rewards", PAGE, flags=re.DOTALL)
    known = {name for name, entry in DPO_LOSSES.items() if entry.differences} - {"sft"}
    assert set(re.findall(r"`(\w+)`", listed)) == known


def test_the_defaults_without_a_reference() -> None:
    for name, beta, sft in re.findall(
        r"^\| `(\w+)` \| beta ([\d.]+).*`sft_weight` ([\d.]+) \|$", PAGE, flags=re.MULTILINE
    ):
        parameters = inspect.signature(getattr(modules, name)).parameters
        assert (parameters["beta"].default, parameters["sft_weight"].default) == (float(beta), float(sft))
