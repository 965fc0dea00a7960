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


def test_the_table_of_losses() -> None:
    """All that compare with a reference, each with its preset where it has one."""
    table = PAGE.split("## Losses of DPO")[1].split("\n- ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert named - {"loss"} == {name for name, entry in DPO_LOSSES.items() if entry.reference} - {"sft"}
    for preset in re.findall(r"`(\w+)`", " ".join(row.split("|")[3] for row in table.splitlines() if "|" in row)):
        assert preset == "label_smoothing" or (REPOSITORY / "configs" / "presets" / f"{preset}.yaml").is_file()


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
