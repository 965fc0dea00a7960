"""Rewards of programs in Python: whether a reply's program compiles, passes hidden tests, and is fast.

The program is the reply's last fenced block. It runs in `alignment.sandbox` and nowhere else; without the sandbox these
rewards cannot be loaded, and the run ends before it has begun. A reply without a program scores 0. Where the sandbox
fails, or the time of the batch is up, a completion abstains (None); where it fails for all of a batch, the call raises,
so that it counts as a fault of the reward and stops a run that goes on so.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args

from alignment.errors import UserError
from alignment.rewards.code_cases import Case, cases_of, passes, ran
from alignment.sandbox import Limits, Sandbox, SandboxFailed
from alignment.settings import as_config

log = logging.getLogger(__name__)

Block = Literal["last", "first", "all"]
Job = TypeVar("Job", bound=Hashable)
Task = tuple[str, str | None, str]
"""A program, the function to call or None, and the JSON of its tests."""

_BLOCK = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[ \t]*(?P<tag>[\w+-]*)[^\n]*\n(?P<text>.*?)^ {0,3}(?P=fence)[`~]*[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_TAGS = ("", "python", "python3", "py")


class Late(Exception):
    """The time of the batch is up."""


def program_in(completion: str, block: Block = "last") -> str | None:
    """The program in a reply, None when it has none: its `last` or `first` complete fenced block that is marked as
    Python or not marked, or `all` of the reply."""
    if block == "all":
        return completion if completion.strip() else None
    found = [m["text"] for m in _BLOCK.finditer(completion) if m["tag"].lower() in _TAGS and m["text"].strip()]
    return found[-1 if block == "last" else 0] if found else None


def check_block(block: str) -> None:
    """Raise UserError for a block that does not exist."""
    if block not in get_args(Block):
        raise UserError(f"block is '{block}'; use {', '.join(get_args(Block))}")


def scored(
    jobs: Sequence[Job | None], score: Callable[[Job, float], float | None], deadline_s: float, workers: int | None
) -> list[float | None]:
    """A score for each job, equal ones computed once, in parallel threads.

    Args:
        jobs: None stands for a reply without a program, whose score is 0.
        score: (job, time by `time.monotonic` when it must be done) -> its score, or None to abstain. Where it raises
            SandboxFailed or Late the job abstains.
        deadline_s: seconds for all of them.
        workers: threads; None for as many as there are CPU cores to use.

    Raises SandboxFailed when it was raised and no job has a score.
    """
    end = time.monotonic() + deadline_s
    distinct = list(dict.fromkeys(job for job in jobs if job is not None))
    failures: list[SandboxFailed] = []

    def one(job: Job) -> float | None:
        try:
            return score(job, end) if time.monotonic() < end else None
        except SandboxFailed as failed:
            failures.append(failed)
        except Late:
            pass
        return None

    with ThreadPoolExecutor(max(1, min(workers or os.cpu_count() or 1, len(distinct)))) as pool:
        values = dict(zip(distinct, pool.map(one, distinct), strict=True))
    if failures and all(value is None for value in values.values()):
        raise failures[0]
    if lost := sum(value is None for value in values.values()):
        log.warning("%d of %d programs have no score: %s", lost, len(values), failures[0] if failures else "too slow")
    return [0.0 if job is None else values[job] for job in jobs]


def tasks_of(
    completions: Sequence[str], columns: Sequence[Mapping[str, Any]], column: str, function_column: str, block: Block
) -> tuple[list[Task | None], list[bool]]:
    """(what is to be tested for each completion, whether its row has tests)."""
    tasks: list[Task | None] = []
    known: list[bool] = []
    for completion, row in zip(completions, columns, strict=True):
        tests, named, program = row.get(column), row.get(function_column), program_in(completion, block)
        function = named if isinstance(named, str) else None
        try:
            cases_of(tests, function)
        except ValueError as error:
            if tests is not None:
                _tell(f"column '{column}': {error}; completions of that row abstain")
            known.append(False)
            tasks.append(None)
            continue
        text = tests if isinstance(tests, str) else json.dumps(tests)
        tasks.append(None if program is None else (program, function, text))
        known.append(True)
    return tasks, known


class Compiles:
    """1 where the reply's program compiles, 0 elsewhere. Nothing of it is run.

    Args:
        block: which fenced block is the program: the `last`, the `first`, or `all` of the reply.
        limits: of the sandbox; see `alignment.sandbox.Limits`.
        deadline_s: seconds for a batch; what is not done by then abstains. Keep it below the reward's timeout_s.
        workers: programs at a time. Null: as many as there are CPU cores.
    """

    def __init__(
        self,
        block: Block = "last",
        limits: dict[str, Any] | None = None,
        deadline_s: float = 25.0,
        workers: int | None = None,
    ) -> None:
        check_block(block)
        self.sandbox = Sandbox(as_config(Limits, limits))
        self.sandbox.check()
        self.block, self.deadline_s, self.workers = block, deadline_s, workers

    def __call__(self, completions: list[str]) -> list[float | None]:
        programs = [program_in(completion, self.block) for completion in completions]
        return scored(programs, self._score, self.deadline_s, self.workers)

    def _score(self, program: str, end: float) -> float:
        return float(self.sandbox.compiles(program, timeout_s=_left(end)))


class UnitTests:
    """The share of a row's hidden tests that the reply's program passes. Abstains where the row has none.

    Each case runs in a sandbox of its own, which holds the case's input and not what is expected of it. After a case
    that was killed by the clock the remaining ones count as failed.

    Args:
        column: data column with the tests; see `alignment.rewards.code_cases`.
        function: data column with the name of the function that cases of the form {call, returns} call.
        all_or_nothing: 1 where all tests pass and 0 elsewhere, in place of the share.
        block, limits, deadline_s, workers: see Compiles.
    """

    def __init__(
        self,
        column: str = "tests",
        function: str = "function",
        all_or_nothing: bool = False,
        block: Block = "last",
        limits: dict[str, Any] | None = None,
        deadline_s: float = 25.0,
        workers: int | None = None,
    ) -> None:
        check_block(block)
        self.sandbox = Sandbox(as_config(Limits, limits))
        self.sandbox.check()
        self.needs_columns = (column,)
        self.column, self.function, self.all_or_nothing, self.block = column, function, all_or_nothing, block
        self.deadline_s, self.workers = deadline_s, workers

    def __call__(self, completions: list[str], columns: list[Mapping[str, Any]]) -> list[float | None]:
        tasks, known = tasks_of(completions, columns, self.column, self.function, self.block)
        scores = scored(tasks, self._score, self.deadline_s, self.workers)
        return [score if tested else None for score, tested in zip(scores, known, strict=True)]

    def _score(self, task: Task, end: float) -> float:
        program, function, tests = task
        cases = cases_of(tests, function)
        passed = 0
        for case in cases:
            seen = ran(self.sandbox, program, function, case, _left(end))
            if seen.ending == "timeout":
                _left(end)  # whose time was up: the program's, or the batch's
                break
            passed += passes(seen, case)
        return float(passed == len(cases)) if self.all_or_nothing else passed / len(cases)


class RunTime:
    """How fast a correct program is: min(1, allowed time / its time), and 0 where a test fails. Abstains where the row
    has no tests.

    Its time is the sum over the tests of the shortest of some repeats, measured outside from the program's start to its
    end. Times differ from one run to the next: this is a reward whose value is not a function of what is scored.

    Args:
        reference: data column with a correct program; a program may take `slack` times as long.
        budget_s: seconds allowed for all tests together, in place of a reference.
        slack: see reference.
        repeats: how often each test is run.
        column, function: see UnitTests. block, limits, deadline_s, workers: see Compiles.
    """

    def __init__(
        self,
        reference: str = "solution",
        budget_s: float | None = None,
        slack: float = 1.5,
        repeats: int = 2,
        column: str = "tests",
        function: str = "function",
        block: Block = "last",
        limits: dict[str, Any] | None = None,
        deadline_s: float = 25.0,
        workers: int | None = None,
    ) -> None:
        check_block(block)
        if not slack > 0 or repeats < 1 or (budget_s is not None and not budget_s > 0):
            raise UserError(
                f"slack is {slack}, repeats {repeats}, budget_s {budget_s}; repeats is at least 1, the others above 0"
            )
        self.sandbox = Sandbox(as_config(Limits, limits))
        self.sandbox.check()
        self.needs_columns = (column,) if budget_s is not None else (column, reference)
        self.reference, self.budget_s, self.slack, self.repeats = reference, budget_s, slack, repeats
        self.column, self.function, self.block = column, function, block
        self.deadline_s, self.workers = deadline_s, workers
        self._allowed: dict[Task, float] = {}

    def __call__(self, completions: list[str], columns: list[Mapping[str, Any]]) -> list[float | None]:
        tasks, known = tasks_of(completions, columns, self.column, self.function, self.block)
        texts = [row.get(self.reference) if self.budget_s is None else None for row in columns]
        references = [text if isinstance(text, str) else None for text in texts]
        jobs = [None if task is None else (task, text) for task, text in zip(tasks, references, strict=True)]
        scores = scored(jobs, self._score, self.deadline_s, self.workers)
        return [score if tested else None for score, tested in zip(scores, known, strict=True)]

    def _score(self, job: tuple[Task, str | None], end: float) -> float | None:
        task, reference = job
        seconds = self._seconds(task, end)
        if seconds is None:
            return 0.0
        allowed = self.budget_s
        if allowed is None:
            if reference is None:
                return None
            allowed = self._allowance((reference, *task[1:]), end)
        return None if allowed is None else min(1.0, allowed / seconds)

    def _allowance(self, task: Task, end: float) -> float | None:
        """Seconds a program may take for these tests; None when the reference itself does not pass them."""
        if task not in self._allowed:
            seconds = self._seconds(task, end)
            if seconds is None:
                _tell(f"column '{self.reference}': a program fails its own tests; completions of its row abstain")
                return None
            self._allowed[task] = self.slack * seconds
        return self._allowed[task]

    def _seconds(self, task: Task, end: float) -> float | None:
        """The time a program takes for its tests; None when it fails one."""
        program, function, tests = task
        total = 0.0
        for case in cases_of(tests, function):
            shortest = self._shortest(program, function, case, end)
            if shortest is None:
                return None
            total += shortest
        return total

    def _shortest(self, program: str, function: str | None, case: Case, end: float) -> float | None:
        shortest = None
        for _ in range(self.repeats):
            seen = ran(self.sandbox, program, function, case, _left(end))
            if not passes(seen, case):
                if seen.ending == "timeout":
                    _left(end)
                return None
            shortest = seen.seconds if shortest is None else min(shortest, seen.seconds)
        return shortest


@lru_cache(maxsize=256)
def _tell(message: str) -> None:
    """Log a message, once."""
    log.warning("%s", message)


def _left(end: float) -> float:
    """Seconds left of the batch's time. Raises Late when there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise Late
    return left
