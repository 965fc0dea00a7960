"""Answers compared with the data's, with values worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.rewards import ExactMatch, NumericMatch
from alignment.rewards.match import answer_in, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("12 apples and 30 pears make 42", 42),
        ("1,234,567.5 dollars", Fraction("1234567.5")),
        ("1,23", 23),  # no thousands separator: two numbers
        ("= -3", -3),
        ("5-3", 3),
        ("(5)-3", 3),
        ("\u22127 degrees", -7),
        ("+4", 4),
        ("3/4", Fraction(3, 4)),
        ("2 / 8 of it", Fraction(1, 4)),
        ("6/0", None),
        (".5", Fraction(1, 2)),
        ("1.5e3", 1500),
        ("2E-2", Fraction(1, 50)),
        ("50%", 50),
        ("$9.99!", Fraction("9.99")),
        ("答案是42。", 42),
        ("x2", None),
        ("version 1.2.3", Fraction("1.2")),
        ("8km", 8),
        ("\\frac no number", None),
        ("", None),
        ("9" * 5000 + " or 7", 7),
        ("7 or " + "9" * 5000, 7),  # thousands of digits are no answer
    ],
)
def test_the_last_number(text: str, number: Any) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        ("a <answer> 4 </answer> b", "tag", "4"),
        ("<answer>1</answer><answer>2</answer>", "tag", "2"),
        ("<answer>1</answer> and <answer>2", "tag", "1"),
        ("4</answer>", "tag", None),
        ("<answer>4", "tag", None),
        ("", "tag", None),
        (r"so \boxed{\frac{1}{2}} it is", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "boxed", "2"),
        (r"\boxed{1}, no: \boxed{2", "boxed", "1"),
        (r"\boxed 1", "boxed", None),
        (" all ", "all", " all "),
        ("3 x 4 = 12.", "number", "12"),
        ("so 1,234 it is", "number", "1234"),
        ("7 - 9 is -2", "number", "-2"),
        ("none", "number", None),
    ],
)
def test_where_the_answer_is(text: str, extract: Any, answer: str | None) -> None:
    assert answer_in(text, extract) == answer


def test_exact_match() -> None:
    reward = ExactMatch(column="target")
    assert reward.needs_columns == ("target",)
    assert reward(" New   York\n", {"target": "New York"}) == 1.0
    assert reward("new york", {"target": "New York"}) == 0.0
    assert reward("7", {"target": 7}) == 1.0
    assert reward("anything", {"target": None}) is None
    assert ExactMatch(ignore_case=True)("STRASSE", {"answer": "Straße"}) == 1.0
    assert ExactMatch(ignore_space=False)("a ", {"answer": "a"}) == 0.0
    assert ExactMatch(extract="tag")("a", {"answer": "a"}) == 0.0
    assert ExactMatch(extract="tag", tag="out")("<out>a</out>", {"answer": "a"}) == 1.0


def test_numeric_match() -> None:
    reward = NumericMatch()
    assert reward("so it is 1,234.0", {"answer": "#### 1234"}) == 1.0
    assert reward("793546071", {"answer": 793546072}) == 0.0
    assert reward("no idea", {"answer": 0}) == 0.0
    assert reward("0.3", {"answer": 0.3}) == 1.0
    assert reward("1", {"answer": None}) is None
    assert NumericMatch(tolerance=0.01)("3.14", {"answer": "3.15"}) == 1.0
    assert NumericMatch(tolerance=0.01)("3.14", {"answer": "3.16"}) == 0.0
    assert NumericMatch(extract="tag")("<answer>8</answer> of 9", {"answer": 8}) == 1.0
    with pytest.raises(ValueError, match="column 'answer' holds 'none', which has no number"):
        reward("1", {"answer": "none"})


def test_settings_that_cannot_work() -> None:
    with pytest.raises(UserError, match="use all, tag, boxed, number"):
        ExactMatch(extract="first")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="tolerance"):
        NumericMatch(tolerance=-1.0)
    with pytest.raises(UserError, match="tolerance"):
        NumericMatch(tolerance=float("nan"))
