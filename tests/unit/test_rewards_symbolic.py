"""Answers compared as mathematics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.rewards import MathVerify

math_verify = pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("completion", "expected", "value"),
    [
        (r"Half of it: \boxed{0.5}", "1/2", 1.0),
        ("The answer is 1/2.", r"$\frac{1}{2}$", 1.0),
        (r"so $x = \frac{3}{4}$", r"\frac{3}{4}", 1.0),  # without dollars in the data
        (r"$2\sqrt{2}$", r"\sqrt{8}", 1.0),
        (r"$\{2, 1\}$", r"$\{1, 2\}$", 1.0),
        (r"${1,2,3,4}$", r"${1,3} \cup {2,4}$", 1.0),  # the README of math-verify
        (r"First \boxed{7} but then we see that it is \boxed{8}.", "8", 1.0),
        (r"\boxed{7}, or \boxed{8}", "8", 0.0),  # the set of both
        (r"\boxed{7}, or \boxed{8}", r"$\{7, 8\}$", 1.0),
        (r"$5$, no: \boxed{6}", "5", 0.0),  # the boxed one is the answer
        ("It is 1,200 dollars", "1200", 1.0),
        ("It is 1,201 dollars", "1200", 0.0),
        ("I do not know.", "8", 0.0),
        ("", "8", 0.0),
        ("8", None, None),
        ("8", "none at all", None),
        ("8", "", None),
        ("42", 42, 1.0),
    ],
)
def test_equal_as_mathematics(completion: str, expected: Any, value: float | None) -> None:
    assert MathVerify()(completion, {"answer": expected}) == value


def test_only_latex_counts_when_asked() -> None:
    reward = MathVerify(column="solution", accept="latex")
    assert reward.needs_columns == ("solution",)
    assert reward("The answer is 8.", {"solution": "8"}) == 0.0
    assert reward("The answer is $8$.", {"solution": "8"}) == 1.0


def test_too_long_and_broken_is_no_verdict() -> None:
    """Neither says that the answer is wrong."""
    for error in (math_verify.errors.TimeoutException("too long"), RecursionError("deep"), TypeError("odd")):

        def fail(*_: Any, error: BaseException = error, **__: Any) -> bool:
            raise error

        reward = MathVerify()
        reward._library = SimpleNamespace(parse=math_verify.parse, verify=fail)
        assert reward("8", {"answer": "8"}) is None
        reward._library = SimpleNamespace(parse=fail, verify=math_verify.verify)
        assert reward("8", {"answer": "8"}) is None


def test_what_cannot_work() -> None:
    with pytest.raises(UserError, match="accept is 'text'; use any or latex"):
        MathVerify(accept="text")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seconds is 0"):
        MathVerify(seconds=0)
