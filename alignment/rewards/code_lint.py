"""Rewards that read a program without running it: its style by flake8, its security by bandit (extra `rewards`).

Both tools run outside the sandbox, on text alone, in processes of their own with a time limit; neither imports or runs
what it reads. A reply without a program, or with one that cannot be parsed, scores 0. Comments that silence the tools
(`# noqa`, `# nosec`) are ignored: a policy would learn to write them. Scores are 1 / (1 + findings), not a share of the
lines, which filler lines would raise. Where a tool fails the completion abstains.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from alignment.errors import UserError
from alignment.rewards.code import Block, check_block, program_in

log = logging.getLogger(__name__)


class Linter(ABC):
    """Runs a tool on the programs of a batch, in as many parts as there are workers.

    Args:
        block: which fenced block is the program: the `last`, the `first`, or `all` of the reply.
        deadline_s: seconds for a batch; what is not done by then abstains. Keep it below the reward's timeout_s.
        workers: processes at a time. Null: as many as there are CPU cores.
    """

    tool: str
    """The package, which is also the module to run."""

    def __init__(self, block: Block, deadline_s: float, workers: int | None) -> None:
        check_block(block)
        if importlib.util.find_spec(self.tool) is None:
            raise UserError(f"{self.tool} is missing: pip install 'lightning-alignment[rewards]'")
        self.block, self.deadline_s = block, deadline_s
        self.workers = workers or os.cpu_count() or 1

    @abstractmethod
    def options(self) -> list[str]:
        """What the tool is told before the names of the files."""

    @abstractmethod
    def findings(self, output: str) -> Mapping[str, float] | None:
        """File name -> weighted findings; None when the tool has not read all of them."""

    def __call__(self, completions: list[str]) -> list[float | None]:
        end = time.monotonic() + self.deadline_s
        programs = [program_in(completion, self.block) for completion in completions]
        distinct = list(dict.fromkeys(p for p in programs if p is not None and parses(p)))
        parts = [distinct[i :: self.workers] for i in range(min(self.workers, len(distinct)))]
        scores: dict[str, float | None] = {}
        if parts:
            with ThreadPoolExecutor(len(parts)) as pool:
                for part, values in zip(parts, pool.map(partial(self._scores, end=end), parts), strict=True):
                    scores |= dict(zip(part, values, strict=True))
        if lost := sum(score is None for score in scores.values()):
            log.warning("%s has no result for %d of %d programs", self.tool, lost, len(scores))
        return [0.0 if program is None else scores.get(program, 0.0) for program in programs]

    def _scores(self, programs: Sequence[str], end: float) -> list[float | None]:
        """Halved until the one is found that the tool fails on."""
        counts = self._run(programs, end - time.monotonic())
        if counts is not None:
            return [1 / (1 + count) for count in counts]
        if len(programs) == 1 or time.monotonic() >= end:
            return [None] * len(programs)
        half = len(programs) // 2
        return [*self._scores(programs[:half], end), *self._scores(programs[half:], end)]

    def _run(self, programs: Sequence[str], seconds: float) -> list[float] | None:
        with tempfile.TemporaryDirectory(prefix=f"{self.tool}-") as folder:
            names = [f"program{i}.py" for i in range(len(programs))]
            for name, program in zip(names, programs, strict=True):
                Path(folder, name).write_text(program, encoding="utf-8", errors="replace")
            # -P: what lies in the folder is read, never imported.
            line = [sys.executable, "-P", "-m", self.tool, *self.options(), *names]
            try:
                done = subprocess.run(
                    line, cwd=folder, capture_output=True, text=True, timeout=max(seconds, 0.001), check=False
                )
            except subprocess.TimeoutExpired:
                return None
        found = self.findings(done.stdout) if done.returncode == 0 else None
        return None if found is None else [found.get(name, 0.0) for name in names]


def parses(program: str) -> bool:
    """Whether a text is Python. Nothing of it is run."""
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return False
    return True


class Flake8(Linter):
    """1 / (1 + the complaints of flake8 about the reply's program).

    Args:
        max_line_length: of a line, in characters.
        ignore: codes of complaints that do not count, such as W292 (no newline at the end).
        block, deadline_s, workers: see Linter.
    """

    tool = "flake8"

    def __init__(
        self,
        max_line_length: int = 79,
        ignore: Sequence[str] = ("W292", "W391"),
        block: Block = "last",
        deadline_s: float = 25.0,
        workers: int | None = None,
    ) -> None:
        super().__init__(block, deadline_s, workers)
        if max_line_length < 1:
            raise UserError(f"max_line_length is {max_line_length}; it must be positive")
        self.max_line_length, self.ignore = max_line_length, tuple(ignore)

    def options(self) -> list[str]:
        line = ["--isolated", "--disable-noqa", "--exit-zero", "--jobs=1", "--format=%(path)s"]
        ignored = [f"--extend-ignore={','.join(self.ignore)}"] if self.ignore else []
        return [*line, f"--max-line-length={self.max_line_length}", *ignored]

    def findings(self, output: str) -> Mapping[str, float] | None:
        return Counter(Path(line).name for line in output.splitlines() if line)


class Bandit(Linter):
    """1 / (1 + the findings of bandit in the reply's program, weighted by severity).

    Args:
        low, medium, high: weight of a finding of that severity.
        block, deadline_s, workers: see Linter.
    """

    tool = "bandit"

    def __init__(
        self,
        low: float = 0.25,
        medium: float = 1.0,
        high: float = 3.0,
        block: Block = "last",
        deadline_s: float = 25.0,
        workers: int | None = None,
    ) -> None:
        super().__init__(block, deadline_s, workers)
        if not min(low, medium, high) >= 0:
            raise UserError(f"low, medium and high are {low}, {medium} and {high}; weights are not negative")
        self.weights = {"LOW": low, "MEDIUM": medium, "HIGH": high}

    def options(self) -> list[str]:
        return ["--quiet", "--format=json", "--ignore-nosec", "--exit-zero"]

    def findings(self, output: str) -> Mapping[str, float] | None:
        try:
            report = json.loads(output)
        except ValueError:
            return None
        if report["errors"]:
            return None
        found: defaultdict[str, float] = defaultdict(float)
        for result in report["results"]:
            found[Path(result["filename"]).name] += self.weights.get(result["issue_severity"], 0.0)
        return found
