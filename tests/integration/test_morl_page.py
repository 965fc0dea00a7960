"""The commands of docs/morl.md, in their order, made short; what it says of methods is what there is."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from alignment.cli import main
from alignment.combine import COMBINERS
from alignment.policy import PolicyConfig, load_policy
from alignment.scalarise import SCALARISATIONS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "morl.md").read_text(encoding="utf-8")
FIT = ["--data.max_rows=4", "--data.max_eval_rows=2", "--data.batch_size=4", "--trainer.max_steps=1"]
FIT += ["--model.completions=2", "--model.sampling.max_tokens=4", "--trainer.num_sanity_val_steps=0"]


@pytest.mark.slow
def test_commands(workdir: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    (row,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    pairs = [json.loads(row) | {"prompt": f"Question {n}?"} for n in range(20)]
    (workdir / "my_pairs_with_margin.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 12
    for line in lines:
        words = shlex.split(line.split("  #")[0])[1:]
        extra = {"fit": FIT, "predict": ["--data.max_eval_rows=2"]}.get(words[0], [])
        if "configs/modpo.yaml" in words:
            extra = [word for word in FIT if not word.startswith("--model.")]
        assert main([*words, *extra]) == 0, line
    load_policy(PolicyConfig(name=str(workdir / "models" / "both")))
    prompts = next(workdir.rglob("predictions.jsonl")).read_text()
    assert "[right 0.8, warm 0.2, short 0.0] " in prompts


def test_the_table_of_methods() -> None:
    _, *rows = re.findall(r"^\| `(\w+)` \|.*\| (.*?) \|$", PAGE, flags=re.MULTILINE)  # without the table's head
    for name, settings in rows:
        parameters = inspect.signature(COMBINERS.find(name)).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert re.findall(r"`(\w+)`", settings) == known, name
    ours = {name for name in COMBINERS if COMBINERS.find(name).__module__ == "alignment.combine"}
    assert {name for name, _ in rows} == ours
    assert all(f"`{name}`" in PAGE for name in SCALARISATIONS)
