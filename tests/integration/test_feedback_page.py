"""What docs/feedback.md shows works as shown: its service writes, its command learns, its table names every setting."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest

from alignment.cli import main
from datamodules import FollowConfig

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "feedback.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (text,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return text


@pytest.fixture
def command(workdir: Path) -> list[str]:
    """The words of the command, made to end by themselves; its folder is made as the page says."""
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    made, line = block("bash").splitlines()
    assert made == "mkdir -p feedback"
    (workdir / "feedback").mkdir()
    words = ["--data.follow.quiet=0", "--data.batch_size=4", "--data.follow.epoch=2", "--trainer.log_every_n_steps=1"]
    words += ["--data.val_fraction=0.3", "--trainer.num_sanity_val_steps=0"]
    return [*shlex.split(line)[1:], *words]


def test_the_service_and_the_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("my_service.py").write_text(block("python"))
    service = import_module("my_service")
    for n in range(20):
        service.on_vote(f"What is {n}?", f"It is {n}.", "No idea.")
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert re.search(r"rows read\s+│?\s*20\b", shown)
    service.on_vote("And now?", "Now.", "Later.")
    capsys.readouterr()
    assert main([*command, "--ckpt_path=last"]) == 0
    assert re.search(r"rows read\s+│?\s*21\b", capsys.readouterr().out)
    logged = [json.loads(line) for file in Path().rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    assert {"loss", "val/loss"} <= {name for line in logged for name in line}


def test_the_table_of_the_page(command: list[str]) -> None:
    with closing(sqlite3.connect("votes.db")) as database, database:
        database.execute(block("sql"))
        rows = [(f"What is {n}?", f"It is {n}.", "No idea.") for n in range(8)]
        database.executemany("INSERT INTO feedback (prompt, chosen, rejected) VALUES (?, ?, ?)", rows)
    assert main([*command, "--data.path=votes.db", "--data.val_fraction=0"]) == 0


def test_the_page_names_every_setting() -> None:
    section = PAGE.split("## Learn from it")[1]
    named = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(FollowConfig)]
    given = FollowConfig()
    for name in ("rows", "every", "replay", "epoch", "poll"):
        (said,) = re.findall(rf"^\| `{name}` \|.*\((\d+)\)", section, flags=re.MULTILINE)
        assert float(said) == getattr(given, name), name
    assert given.memory == 1000
    assert "(1,000)" in section


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.path=none"], "data.follow: there is no folder 'none'"),
        (["--data.path=rows.csv"], "data.follow: 'rows.csv' cannot be followed"),
        (["--data.follow.table=votes"], "a table is of an sqlite file, and 'feedback' is none"),
        (["--data.max_rows=5"], "data.follow: max_rows does not go with rows that are still to come"),
        (["--model.reference=cached"], "reference: cached needs rows that are all known"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert "Traceback" not in line
