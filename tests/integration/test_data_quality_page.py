"""What docs/data_quality.md shows works as shown, and what it says of limits and signs is what the code does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from alignment.cli import main
from alignment.quality.negatives import SIGNS
from alignment.quality.settings import LIMITS
from alignment.tiny import save_tiny
from tests.integration.test_docs import REPOSITORY, commands
from tests.quality_toys import pair, write
from tests.unit.test_quality_texts import classifier

__all__ = ["classifier"]
PAGE = (REPOSITORY / "docs" / "data_quality.md").read_text(encoding="utf-8")


@pytest.fixture
def files(workdir: Path, classifier: str) -> Path:
    """The files that the page names: short rows without a fault that fails."""
    pytest.importorskip("krippendorff")
    pytest.importorskip("datasketch")
    words = ("harbour", "mountain", "library", "orchard", "railway", "theatre")
    rows = [pair(f"Where is the {word}?", f"The {word} is near.", f"Look for a {word}.") for word in words]
    write(workdir / "my_pairs.jsonl", rows)
    write(workdir / "train.jsonl", rows[:4])
    write(workdir / "val.jsonl", rows[4:])
    grades = [{**row, "grades": [i % 5, i % 5, None]} for i, row in enumerate(rows)]
    write(workdir / "votes.jsonl", grades)
    save_tiny(workdir / "models" / "mine")
    for name in ("errors", "toxicity"):
        (workdir / "models" / name).symlink_to(classifier)
    return workdir


def test_commands(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command ends with the status that the page gives for its data; `--json` prints JSON alone."""
    lines = commands("data_quality.md")
    assert len(lines) == 8
    for line in lines:
        words = shlex.split(line)[1:]
        words += ["--max_rows", "16"] if "world:support" in words else []
        words = ["toxic" if word == "toxic,threat" else word for word in words]  # what the small model knows
        words += ["--skip", "near_duplicates"] if "world:support" in words else []
        expected = int("--strict" in words or "comparisons=0.1,0.5" in words)
        capsys.readouterr()
        assert main(words) == expected, line
        out = capsys.readouterr().out
        if "--json" in words:
            assert [check["check"] for check in json.loads(out)["checks"]] == list(LIMITS)
        else:
            assert ("report: " in out) == ("--no_tracking" not in words)
    assert len(list((files / "runs" / "data").glob("*/data_quality.html"))) == 6


def test_votes_as_the_page_writes_them(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ann and Bob give different grades, and prefer different replies: nobody agrees with anybody."""
    text = re.search(r"```\n(\{.*?)```", PAGE, flags=re.DOTALL)
    assert text is not None
    one, *two = text[1].splitlines()

    def figures(*lines: str) -> dict[str, Any]:
        (files / "own.jsonl").write_text("".join(f"{line}\n" for line in lines))
        capsys.readouterr()
        main(["data", "check", "own.jsonl", "--no_tracking", "--json"])
        return next(c for c in json.loads(capsys.readouterr().out)["checks"] if c["check"] == "agreement")["figures"]

    assert (figures(one.replace("...", "a", 1).replace("...", "b", 1))["votes"], figures(*two)["votes"]) == (2, 2)


def test_limits_and_signs_of_the_page() -> None:
    assert re.findall(r"^\| `(\w+)` \| .* \| ((?:warn|fail) .*) \|$", PAGE, flags=re.MULTILINE) == [
        (name, str(limit)) for name, limit in LIMITS.items()
    ]
    table = PAGE.split("| kind | its sign |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(SIGNS)
