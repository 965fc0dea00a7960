"""Rewards of programs: what is the program in a reply, what its tests are, and what a score says."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.programming import TASKS, rows
from alignment.rewards import RewardSuite, Samples
from alignment.rewards.code import Compiles, Late, RunTime, UnitTests, program_in, scored
from alignment.rewards.code_cases import Case, cases_of, passes, same
from alignment.rewards.code_lint import Bandit, Flake8, parses
from alignment.sandbox import Ran, Sandbox, SandboxFailed
from tests.sandboxes import need_sandbox

ADD = {"function": "add", "tests": [{"call": [1, 2], "returns": 3}, {"call": [2, 2], "returns": 4}]}
RIGHT = "def add(a, b):\n    return a + b\n"
HALF = "def add(a, b):\n    return a * b\n"  # 2 and 4
SLOW = "import time\n\n\ndef add(a, b):\n    time.sleep(0.5)\n    return a + b\n"
HANGS = "def add(a, b):\n    while True:\n        pass\n"


def fenced(program: str, tag: str = "python") -> str:
    return f"Here it is:\n\n```{tag}\n{program}```\nThat was it."


@pytest.fixture
def sandbox() -> None:
    need_sandbox()


# ---------------------------------------------------------------------- the program in a reply


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("text\n```py title=x\na\n\nb\n```\nmore", "a\n\nb\n"),
        ("~~~python\n```\n~~~", "```\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nrun it\n```", "a\n"),
        ("````python\n```\n````", "```\n"),
        ("```python\na", None),  # cut off
        ("```python\n\n```", None),
        ("no code at all", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_python_block(reply: str, program: str | None) -> None:
    assert program_in(reply) == program


def test_other_blocks() -> None:
    reply = "```python\na\n```\n```python\nb\n```"
    assert program_in(reply, "first") == "a\n"
    assert program_in(reply, "all") == reply
    assert program_in("  ", "all") is None


# ---------------------------------------------------------------------- cases


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        (1, 1, True),
        (True, 1, False),
        (1, True, False),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (10**400, 1.0, False),
        (10**20, 10**20 + 1, False),
        ("1", 1, False),
        (None, 0, False),
        (None, None, True),
        ([1, [2]], [1, [2]], True),
        ([1, 2], [1], False),
        ({"a": [1.0]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([], {}, False),
    ],
)
def test_values_are_equal_as_json(found: Any, expected: Any, equal: bool) -> None:
    assert same(found, expected) is equal


@pytest.mark.parametrize(
    ("output", "passed"),
    [
        ("7", True),
        ("7.0", True),
        ("8", False),
        ("", False),
        ("7 7", False),
        ("NaN", False),
        ("[" * 100_000, False),
        ("9" * 10_000, False),
        (None, False),
    ],
)
def test_only_the_json_of_the_value_passes(output: str | None, passed: bool) -> None:
    ran = Ran(ending="finished", output=output, seconds=0.1, message="")
    assert passes(ran, Case(arguments=[3, 4], expected=7)) is passed


@pytest.mark.parametrize(
    ("output", "passed"),
    [("7\n8\n", True), ("7 \n8", True), ("7\n8\n\n", True), ("7\n\n8\n", False), (" 7\n8\n", False), ("7\n8 9", False)],
)
def test_lines_are_compared_without_their_ends(output: str, passed: bool) -> None:
    case = Case(stdin="3 4", expected="7\n8\n")
    assert passes(Ran(ending="finished", output=output, seconds=0.1, message=""), case) is passed
    assert not passes(Ran(ending="timeout", output=output, seconds=0.1, message=""), case)
    assert not passes(Ran(ending="output", output=output, seconds=0.1, message=""), case)


@pytest.mark.parametrize(
    ("tests", "function", "told"),
    [
        ("not json", "f", "Expecting value"),
        ([], "f", "at least one case"),
        ({"call": []}, "f", "not a list"),
        ([{"call": [1], "returns": 1}, {"call": [1]}], "f", "case 1 is neither"),
        ([{"stdin": 3, "stdout": "3"}], None, "case 0 is neither"),
        ([{"call": [1], "returns": 1}], None, "the name of the function"),
        ([{"call": [1], "returns": 1}], "f(); g", "the name of the function"),
    ],
)
def test_tests_that_are_none(tests: Any, function: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        cases_of(tests, function)


# ---------------------------------------------------------------------- a batch


def test_equal_jobs_are_done_once_and_failures_abstain() -> None:
    done: list[str] = []

    def score(job: str, end: float) -> float:
        done.append(job)
        if job == "failed":
            raise SandboxFailed("no process")
        if job == "late":
            raise Late
        return float(len(job))

    jobs = ["ab", None, "failed", "ab", "late", "abc"]
    assert scored(jobs, score, 60.0, 2) == [2.0, 0.0, None, 2.0, None, 3.0]
    assert sorted(done) == ["ab", "abc", "failed", "late"]


def test_where_the_sandbox_fails_for_all_the_call_fails() -> None:
    def score(job: str, end: float) -> float:
        raise SandboxFailed("no process")

    with pytest.raises(SandboxFailed, match="no process"):
        scored(["a", None, "b"], score, 60.0, 2)
    assert scored([None, None], score, 60.0, 2) == [0.0, 0.0]


def test_what_is_not_begun_in_time_abstains() -> None:
    def score(job: str, end: float) -> float:
        time.sleep(max(0.0, end - time.monotonic()))
        return 1.0

    assert scored(["a", "b"], score, 0.2, 1) == [1.0, None]


# ---------------------------------------------------------------------- in the sandbox


def test_the_share_of_tests_passed(sandbox: None) -> None:
    """One of two is 1/2; a syntax error, a hang and no program are 0; a row without tests, or with none, abstains."""
    replies = [fenced(RIGHT), fenced(HALF), fenced("def add("), fenced(HANGS), "none", fenced(RIGHT), fenced(RIGHT)]
    columns = [*[ADD] * 5, {"tests": None}, {"tests": "[]"}]
    reward = UnitTests(limits={"timeout_s": 1})
    assert reward(replies, columns) == [1.0, 0.5, 0.0, 0.0, 0.0, None, None]
    assert UnitTests(all_or_nothing=True)(replies[:2], columns[:2]) == [1.0, 0.0]


def test_programs_that_read_and_print(sandbox: None) -> None:
    row = {"tests": json.dumps([{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5\n", "stdout": "10\n"}])}
    replies = [fenced("print(sum(map(int, input().split())))\n"), fenced("print(3)\n")]
    assert UnitTests()(replies, [row, row]) == [1.0, 0.5]


def test_a_deadline_that_comes_first_abstains(sandbox: None) -> None:
    """The program might have been done in its own time."""
    assert UnitTests(deadline_s=0.5)([fenced(HANGS), "none"], [ADD, ADD]) == [None, 0.0]


def test_whether_programs_compile(sandbox: None) -> None:
    replies = [fenced(RIGHT), fenced("def add("), "none", fenced(HANGS)]
    assert Compiles()(replies) == [1.0, 0.0, 0.0, 1.0]


def test_a_fast_program_scores_more_than_a_slow_one(sandbox: None) -> None:
    """Two tests that sleep 0.5 s take at least one second; 0.25 s are allowed. A clock patched inside helps none."""
    lies = "import time\n\ntime.perf_counter = time.monotonic = time.time = lambda: 0.0\n"
    replies = [fenced(SLOW), fenced(lies + SLOW), fenced(HALF), "none"]
    slow, lying, wrong, none = RunTime(budget_s=0.25, repeats=1)(replies, [ADD] * 4)
    assert slow is not None
    assert lying is not None
    assert 0 < slow <= 0.25
    assert 0 < lying <= 0.25
    assert (wrong, none) == (0.0, 0.0)


def test_a_reference_sets_the_time(sandbox: None) -> None:
    """Against one that sleeps as long, with a generous slack; a wrong or missing reference says nothing."""
    reward = RunTime(slack=50, repeats=1)
    rows = [{**ADD, "solution": SLOW}, {**ADD, "solution": HALF}, {**ADD, "solution": None}]
    assert reward([fenced(SLOW)] * 3, rows) == [1.0, None, None]


def test_every_solution_of_the_built_in_tasks_passes_its_tests(sandbox: None) -> None:
    tasks = rows("prompts")
    assert UnitTests(deadline_s=60)([fenced(task["solution"]) for task in tasks], tasks) == [1.0] * len(TASKS)


def test_five_rewards_of_a_run(sandbox: None) -> None:
    """As `configs/code_generation.yaml` has them: in workers, style only where all tests pass."""
    pytest.importorskip("flake8")
    pytest.importorskip("bandit")
    passed = {"reward": "passed", "at_least": 1}
    rewards = {
        "compiles": "Compiles",
        "passed": {"reward": "UnitTests", "args": {"limits": {"timeout_s": 5}}},
        "fast": {"reward": "RunTime", "args": {"budget_s": 60.0, "repeats": 1}},
        "style": {"reward": "Flake8", "condition": passed},
        "secure": {"reward": "Bandit", "condition": passed},
    }
    replies = [fenced(RIGHT), fenced(HALF), "I cannot."]
    samples = Samples(prompts=["Add."] * 3, completions=replies, columns=[ADD] * 3)
    with RewardSuite(rewards) as suite:
        matrix = suite.submit_samples(samples).collect()
    assert matrix.names == ("compiles", "passed", "fast", "style", "secure")
    assert matrix.values.tolist() == [[1, 1, 1, 1, 1], [1, 0.5, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert all(not faults for faults in matrix.faults.values())


# ---------------------------------------------------------------------- linters


def test_style_is_one_over_one_plus_complaints() -> None:
    """E401 multiple imports and two F401 unused; F841 that `noqa` would hide; a program that is none."""
    pytest.importorskip("flake8")
    replies = [
        fenced(RIGHT),
        fenced("import os, sys\n"),
        fenced("def f():\n    x = 1  # noqa\n"),
        fenced("# flake8: noqa\nimport os\n"),
        fenced("def add("),
        "none",
        fenced(RIGHT),
    ]
    assert Flake8()(replies) == [1.0, 0.25, 0.5, 0.5, 0.0, 0.0, 1.0]
    assert Flake8(ignore=["E401", "F401"], workers=1)(replies[:2]) == [1.0, 1.0]
    long = fenced(f"x = '{'y' * 80}'\n")
    assert [Flake8(max_line_length=n)([long])[0] for n in (79, 100)] == [0.5, 1.0]


def test_findings_of_security_are_weighted() -> None:
    """B101 assert is low, B102 exec medium, B602 a shell that runs a text high, beside B404 for the import, low."""
    pytest.importorskip("bandit")
    shell = "import subprocess\nsubprocess.run('ls ' + input(), shell=True)  # nosec\n"
    replies = [fenced(RIGHT), fenced("assert True\n"), fenced("exec('1')\n"), fenced(shell), fenced("x = ("), "none"]
    assert Bandit()(replies) == [1.0, 1 / 1.25, 0.5, 1 / 4.25, 0.0, 0.0]
    assert Bandit(low=0, medium=1, high=9, workers=1)(replies[1:4]) == [1.0, 0.5, 0.1]


def test_nothing_is_run_by_a_linter(tmp_path: Any) -> None:
    pytest.importorskip("flake8")
    mark = tmp_path / "ran"
    program = f"open({str(mark)!r}, 'w').close()\nraise SystemExit\n"
    assert Flake8(max_line_length=300)([fenced(program)]) == [1.0]
    assert not mark.exists()


def test_a_linter_that_fails_abstains_for_the_program_it_fails_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the batch keep their scores; without time all abstain."""
    pytest.importorskip("flake8")
    run = Flake8._run

    def stumbles(self: Flake8, programs: Any, seconds: float) -> Any:
        return None if any("stumble" in program for program in programs) else run(self, programs, seconds)

    monkeypatch.setattr(Flake8, "_run", stumbles)
    replies = [fenced(RIGHT), fenced("stumble = 1\n"), fenced("import os\n"), "none"]
    assert Flake8(workers=1)(replies) == [1.0, None, 0.5, 0.0]
    monkeypatch.undo()
    assert Flake8(deadline_s=0.01)(replies) == [None, None, None, 0.0]


def test_what_parses() -> None:
    assert parses("x = 1")
    assert not any(map(parses, ("x = (", "\0", "(" * 5000, "\udcff = 1")))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Compiles(block="middle"), "block is 'middle'; use last, first, all"),  # type: ignore[arg-type]
        (lambda: UnitTests(limits={"memory": 1}), "Limits has no field memory"),
        (lambda: RunTime(slack=0), "slack is 0"),
        (lambda: RunTime(budget_s=0), "budget_s 0"),
        (lambda: Flake8(max_line_length=0), "max_line_length is 0"),
        (lambda: Bandit(high=-1), "weights are not negative"),
    ],
)
def test_settings_that_cannot_work(make: Any, told: str) -> None:
    pytest.importorskip("flake8")
    pytest.importorskip("bandit")
    with pytest.raises(UserError, match=told):
        make()


def test_a_run_is_of_its_own(sandbox: None) -> None:
    """What one test's program has written is not there for the next one's."""
    program = "import os\nprint(os.path.exists('/tmp/x'))\nopen('/tmp/x', 'w').close()\n"
    box = Sandbox()
    assert [box.run(program).output for _ in range(2)] == ["False\n", "False\n"]
