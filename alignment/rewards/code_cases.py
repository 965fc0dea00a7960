"""Hidden tests of a program: what goes in, and whether what came out is what was expected.

A row's tests are a list, or its JSON, of cases in one of two forms:

    {"stdin": "3 4\\n", "stdout": "7\\n"}      the program is run with this input and prints that
    {"call": [3, 4], "returns": 7}            the function that the row's column names is called and returns that

Lines are compared without white space at their ends. Values are compared as JSON: a tuple is a list, true is not 1, and
numbers of which one is a float are equal within 1e-6. Of a case only what goes in is ever inside the sandbox.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment.sandbox import Ran, Sandbox

RELATIVE, ABSOLUTE = 1e-6, 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test. `arguments` is None for a program that is run with `stdin`."""

    expected: Any
    stdin: str = ""
    arguments: Sequence[Any] | None = None


def cases_of(tests: Any, function: object) -> list[Case]:
    """The cases of a row. Raises ValueError, naming the case, for what is none, and for calls without a function."""
    if isinstance(tests, str):
        tests = json.loads(tests)
    if not isinstance(tests, list) or not tests:
        raise ValueError("the tests are not a list of at least one case")
    cases = [_case(test, i) for i, test in enumerate(tests)]
    named = isinstance(function, str) and function.isidentifier()
    if not named and any(case.arguments is not None for case in cases):
        raise ValueError(f"cases of calls need the name of the function, and the row's is {function!r}")
    return cases


def _case(test: Any, i: int) -> Case:
    keys = set(test) if isinstance(test, dict) else set()
    if keys == {"stdin", "stdout"} and isinstance(test["stdin"], str) and isinstance(test["stdout"], str):
        return Case(stdin=test["stdin"], expected=test["stdout"])
    if keys == {"call", "returns"} and isinstance(test["call"], list):
        return Case(arguments=test["call"], expected=test["returns"])
    raise ValueError(f"case {i} is neither {{stdin, stdout}} with texts nor {{call, returns}} with a list of arguments")


def ran(sandbox: Sandbox, program: str, function: str | None, case: Case, timeout_s: float) -> Ran:
    """Run a program on the input of a case. Raises SandboxFailed."""
    if case.arguments is None:
        return sandbox.run(program, case.stdin, timeout_s=timeout_s)
    assert function is not None
    return sandbox.call(program, function, case.arguments, timeout_s=timeout_s)


def passes(seen: Ran, case: Case) -> bool:
    """Whether a program did what a case expects. Its exit code does not matter, a late or excessive output fails."""
    if seen.ending != "finished" or seen.output is None:
        return False
    if case.arguments is None:
        return _lines(seen.output) == _lines(case.expected)
    try:
        found = json.loads(seen.output, parse_constant=_no_number)
    except (ValueError, RecursionError):  # no JSON, thousands of digits, nested too deeply: no value
        return False
    return same(found, case.expected)


def same(found: Any, expected: Any) -> bool:
    """Whether two values of JSON are equal; goes no deeper than `expected` does."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    numbers = isinstance(found, int | float) and isinstance(expected, int | float)
    if numbers and float in (type(found), type(expected)):
        try:
            return math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        except OverflowError:  # an integer beyond float64
            return False
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    return type(found) is type(expected) and bool(found == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
