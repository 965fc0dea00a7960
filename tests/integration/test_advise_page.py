"""docs/advise.md: its commands run, and its table is the tree."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from alignment.advice import leaves
from alignment.cli import main
from alignment.tiny import save_tiny
from tests.integration.test_docs import SMALL, blocks, commands

PAGE = Path(__file__).resolve().parents[2] / "docs" / "advise.md"


def test_commands(workdir: Path) -> None:
    save_tiny(Path("models/mine"))
    rows = [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(12)]
    Path("my_pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert blocks("advise.md", "bash")[0].strip() == "alignment advise"
    for line in commands("advise.md")[1:]:
        assert main([*shlex.split(line)[1:], *(SMALL if " fit " in line else [])]) == 0, line


def test_every_leaf_is_in_the_table() -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    assert len(table) == len(list(leaves()))
    for (_, choice), row in zip(leaves(), table, strict=True):
        module = choice.runs[-1].module
        assert module in row.split("|")[3], row
