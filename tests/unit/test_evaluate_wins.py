"""pass@k and win rates, by hand and with a scripted judge."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.evaluation.base import Subject, share_interval
from alignment.evaluation.wins import PassAtK, WinRate, counted, pass_at_k
from tests.judge_server import Asked, Reply, judging, verdict_on_canary


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return Subject("tiny", device="cpu")


def rows(path: str, values: list[dict[str, Any]]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in values))
    return path


def test_pass_at_k() -> None:
    """Five samples, two right: both of two wrong in 3 of 10 pairs; of four samples at least one is always right."""
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0


def test_programs_that_pass(tiny: Subject, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three prompts the first is right in every sample, the second in none; on the third the reward abstains."""
    Path("checks.py").write_text(
        "seen = []\n"
        "def right(completion, number):\n"
        "    seen.append(number)\n"
        "    return None if number == 2 and seen.count(2) == 1 else float(number == 0)\n"
    )
    monkeypatch.syspath_prepend(str(workdir))
    path = rows("p.jsonl", [{"prompt": f"say {i}", "number": i} for i in range(3)])
    reward = {"reward": "checks.right", "in_process": True}
    found = PassAtK(path, reward, k=[2, 1], samples=3, max_tokens=3).run(tiny).metrics
    assert found == {"unknown": pytest.approx(1 / 9), "pass@1": 0.5, "pass@2": 0.5}
    with pytest.raises(UserError, match=r"k is \[4\] and samples 3"):
        PassAtK(path, reward, k=[4], samples=3)


def test_wins_ties_and_contradictions() -> None:
    """Won, lost, tied, won with a tie in one order, and two that say nothing, one of them a fault."""
    found = counted([1.0, 0.0, 0.5, 0.75, math.nan, math.nan], ["a", "a", "b", "b", "a", None], 1 / 6)
    assert found.metrics == pytest.approx(
        {"win_rate": 0.5625, "wins": 0.5, "ties": 0.25, "losses": 0.25, "faults": 1 / 6, "contradictory": 1 / 6,
         "a/win_rate": 0.5, "b/win_rate": 0.625, "categories/win_rate": 0.5625}
    )  # fmt: skip
    assert found.intervals["win_rate"] == share_interval(2.25, 4)
    with pytest.raises(UserError, match="decided no comparison"):
        counted([math.nan], [None], 1.0)


def longer(asked: Asked) -> Reply:
    """Prefers the longer reply, the first where both are as long."""
    if asked.canary:
        return Reply(verdict_on_canary(asked))
    a, b = asked.parts["REPLY A"], asked.parts["REPLY B"]
    return Reply(f"{asked.code} {'A' if len(a) >= len(b) else 'B'}")


def test_against_a_column_and_a_model(tiny: Subject, workdir: Path) -> None:
    """A longer reference wins in both orders, an empty one loses; the model against itself is a matter of place."""
    values = [{"prompt": "say 1", "reference": "x" * 500}, {"prompt": "say 2", "reference": "!"}]
    path = rows("p.jsonl", values)
    with judging(longer) as server:
        judge = {"endpoint": {"url": server.url, "model": "m", "retries": 0}, "criteria": "Which is longer?"}
        found = WinRate(path, judge, max_tokens=8).run(tiny).metrics
        assert (found["wins"], found["losses"], found["contradictory"], found["faults"]) == (0.5, 0.5, 0, 0)
        with pytest.raises(UserError, match="decided no comparison"):
            WinRate(path, judge, against="tiny", max_tokens=8).run(tiny)


def test_a_row_without_a_reference(tiny: Subject, workdir: Path) -> None:
    path = rows("p.jsonl", [{"prompt": "say 1", "reference": "x"}, {"prompt": "say 2"}])
    judge = {"endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m"}, "criteria": "Which?"}
    with pytest.raises(UserError, match="row 1 has no column 'reference'"):
        WinRate(path, judge).run(tiny)
