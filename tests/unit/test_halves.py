"""All tests in two halves: none twice, none left out, and what both said in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.halves import closing

REPOSITORY = Path(__file__).resolve().parents[2]


def collected(*more: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider", "tests/invariants", *more]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_two_halves_are_the_whole() -> None:
    halves = [collected(f"--half={half}") for half in (0, 1)]
    assert all(halves)
    assert sorted(halves[0] + halves[1]) == sorted(collected())


def test_the_closing_line() -> None:
    """By hand, in both of pytest's forms; what was deselected is in the other half."""
    quiet = "....\n7 passed, 2 skipped, 30 deselected, 1 warning in 2.50s\n"
    loud = "===== 1 failed, 3 passed, 1 error in 61.20s (0:01:01) =====\n"
    assert closing([quiet, loud], 61.5) == "10 passed, 2 skipped, 1 failed, 1 errors, 1 warnings in 61.50s"
    assert closing(["", "no tests ran in 0.10s\n"], 0.1) == "no tests ran in 0.10s"
