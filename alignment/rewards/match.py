"""Rewards that compare a completion's answer with the one in the data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, get_args

from alignment.errors import UserError

Extract = Literal["all", "tag", "boxed", "number"]

# A sign belongs to a number unless something that a difference could start with stands before it: 5-3 is no -3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212]|(?<![\w.]))"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:\s?/\s?\d+(?![\d.]))?",
    re.ASCII,
)


class ExactMatch:
    """1 where the answer is the expected text, 0 elsewhere. Abstains where the row's answer is None.

    Args:
        column: data column with the expected text.
        extract: where in the completion the answer is: `all` of it, the last `<tag>...</tag>`, the last `boxed` LaTeX
            command, or the last `number`. A completion without one is wrong.
        tag: name of the tag.
        ignore_case: compare without regard to case.
        ignore_space: compare words: any white space is one space, none at the ends.
    """

    def __init__(
        self,
        column: str = "answer",
        extract: Extract = "all",
        tag: str = "answer",
        ignore_case: bool = False,
        ignore_space: bool = True,
    ) -> None:
        check_extract(extract)
        self.needs_columns = (column,)
        self.column, self.extract, self.tag = column, extract, tag
        self.ignore_case, self.ignore_space = ignore_case, ignore_space

    def __call__(self, completion: str, columns: Mapping[str, Any]) -> float | None:
        expected = columns[self.column]
        if expected is None:
            return None
        found = answer_in(completion, self.extract, self.tag)
        return float(found is not None and self._plain(found) == self._plain(str(expected)))

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_space else text
        return text.casefold() if self.ignore_case else text


class NumericMatch:
    """1 where the last number of the answer equals the expected one, 0 elsewhere. Abstains where the row's is None.

    Numbers may have a sign, thousands separators (1,234), decimals, an exponent, or be fractions (3/4); they are
    compared exactly unless a tolerance is given, so 793546071 is not 793546072.

    Args:
        column: data column with the expected number, or a text whose last number it is.
        extract, tag: as for ExactMatch.
        tolerance: largest difference that still counts as equal.

    Raises ValueError, a fault of this row, when the expected value holds no number.
    """

    def __init__(
        self, column: str = "answer", extract: Extract = "all", tag: str = "answer", tolerance: float = 0.0
    ) -> None:
        check_extract(extract)
        if not tolerance >= 0:
            raise UserError(f"tolerance is {tolerance}; it must not be negative")
        self.needs_columns = (column,)
        self.column, self.extract, self.tag, self.tolerance = column, extract, tag, Fraction(tolerance)

    def __call__(self, completion: str, columns: Mapping[str, Any]) -> float | None:
        given = columns[self.column]
        if given is None:
            return None
        expected = last_number(str(given))
        if expected is None:
            raise ValueError(f"column '{self.column}' holds {given!r}, which has no number in it")
        found = last_number(answer_in(completion, self.extract, self.tag) or "")
        return float(found is not None and abs(found - expected) <= self.tolerance)


def answer_in(completion: str, extract: Extract, tag: str = "answer") -> str | None:
    """The part of a completion that is its answer, None when it has none."""
    if extract == "all":
        return completion
    if extract == "boxed":
        return _boxed(completion)
    if extract == "number":
        numbers = _NUMBER.findall(completion)
        return numbers[-1].replace(",", "").replace("\u2212", "-") if numbers else None
    end = completion.rfind(f"</{tag}>")
    start = completion.rfind(f"<{tag}>", 0, max(end, 0))
    return completion[start + len(tag) + 2 : end].strip() if end >= 0 and start >= 0 else None


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None when there is none."""
    for found in reversed(list(_NUMBER.finditer(text))):
        number, _, below = found.group().replace(",", "").replace("\u2212", "-").partition("/")
        try:
            return Fraction(number.strip()) / Fraction(below.strip() or 1)
        except (ValueError, ZeroDivisionError):  # thousands of digits, or a fraction over 0: not an answer
            continue
    return None


def _boxed(text: str) -> str | None:
    """What stands in the braces of the last complete boxed command."""
    command = "\\boxed{"
    start = text.rfind(command)
    while start >= 0:
        depth = 1
        for at in range(start + len(command), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[start + len(command) : at].strip()
        start = text.rfind(command, 0, start)
    return None


def check_extract(extract: str) -> None:
    """Raise UserError for a place that does not exist."""
    if extract not in get_args(Extract):
        raise UserError(f"extract is '{extract}'; use {', '.join(get_args(Extract))}")
