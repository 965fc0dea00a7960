"""What docs/stages.md shows works as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from alignment.cli import main
from tests.integration.test_docs import SMALL, blocks, commands, folder
from tests.unit.test_planned import rows

__all__ = ["folder"]
QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
PAIRS = ["-c", "configs/dpo.yaml", "--trainer.callbacks=[]"]


def test_a_callback_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("stages.md", "python")
    name = re.match(r"# (\w+\.py)\n", code)
    assert name is not None
    (folder / name[1]).write_text(code)
    (line,) = commands("stages.md")
    assert main([*shlex.split(line)[1:], *SMALL]) == 0


def test_configurations(folder: Path) -> None:
    stages, strata, mix = blocks("stages.md", "yaml")
    Path("stages.yaml").write_text(stages)
    assert main(["fit", *PAIRS, "-c", "stages.yaml", *SMALL, *QUIET]) == 0
    Path("mix.yaml").write_text(mix)
    path = Path(rows(folder, kind="pairs"))
    text = path.read_text()
    for name, other in (("math", "safety"),):
        text = text.replace(name, other)
    Path("pairs.jsonl").write_text(text)
    assert main(["fit", *PAIRS, "-c", "mix.yaml", *SMALL, "--data.max_rows=24", "--data.val_fraction=0", *QUIET]) == 0
    Path("strata.yaml").write_text(
        "trainer:\n  callbacks+:\n    - class_path: callbacks.Stages\n      init_args:\n"
        + "".join(f"        {line}\n" for line in strata.splitlines())
    )
    words = ["fit", "-c", "configs/grpo.yaml", "--trainer.callbacks=[]", "-c", "strata.yaml", "--data.strata.by=length"]
    words += ["--model.completions=2", "--model.sampling.max_tokens=4", "--trainer.limit_val_batches=0"]
    assert main([*words, *SMALL, "--trainer.max_steps=-1", "--trainer.max_epochs=2", *QUIET]) == 0
