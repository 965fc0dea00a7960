"""The built-in programming tasks as a source of data; that their solutions pass their tests is in test_rewards_code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.programming import TASKS, rows
from alignment.rewards.code import program_in
from alignment.rewards.code_cases import cases_of
from datamodules import PromptData
from datamodules.reading import open_source

REPOSITORY = Path(__file__).resolve().parents[2]


def test_prompts_show_no_test() -> None:
    """They name the function and nothing of its tests; for supervised training the reply is the solution."""
    for task, row, pair in zip(TASKS, rows("prompts"), rows("sft"), strict=True):
        assert task.signature in row["prompt"][0]["content"]
        assert row["tests"] not in json.dumps(row["prompt"])
        assert program_in(pair["messages"][1]["content"]) == task.solution == row["solution"]
        assert len(cases_of(row["tests"], row["function"])) == len(task.tests) >= 3
    assert len({task.function for task in TASKS}) == len(TASKS) == 24
    assert f"{len(TASKS)} small programming tasks" in (REPOSITORY / "docs" / "data.md").read_text()


def test_prompts_reach_the_rewards_with_their_tests(tiny_tokenizer, tmp_path: Path) -> None:
    data = PromptData("world:code", tokenizer=tiny_tokenizer, val_fraction=0.2, cache_dir=str(tmp_path))
    train, held_out = data.groups("train"), data.groups("val")
    assert len(train) + len(held_out) == len(TASKS)
    assert len(held_out) > 0
    solutions = {row["function"]: row["solution"] for row in rows("prompts")}
    for group in (train[0], held_out[0]):
        assert solutions[group.columns["function"]] == group.columns["solution"]
        assert json.loads(group.columns["tests"])[0].keys() == {"call", "returns"}


@pytest.mark.parametrize(
    ("split", "kind", "told"), [("test", "prompts", "has one split, train"), ("train", "preference", "no pairs")]
)
def test_what_it_does_not_have(split: str, kind: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        open_source("world:code", split=split, config=None, kind=kind, size=None)  # type: ignore[arg-type]
