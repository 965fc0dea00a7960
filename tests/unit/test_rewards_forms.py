"""Rewards of form and length, with the numbers of ALGORITHMS sections 5 and 8 or worked out by hand."""

from __future__ import annotations

import pytest

from alignment.errors import UserError
from alignment.rewards import Efficiency, Format, LengthWithin, RepetitionPenalty, SoftOverlong


def ids(length: int) -> list[int]:
    return list(range(length))


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 1.0), (1, 1.0), (2, 0.590616), (8, 0.324734), (64, 0.193840), (512, 0.138154)]
)
def test_efficiency(tokens: int, value: float) -> None:
    """Section 8: 1 / (1 + ln len), len at least 1, in tokens: the text's length does not matter."""
    assert Efficiency()("x" * 1000, ids(tokens)) == pytest.approx(value, abs=5e-7)


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20481, -1.0)]
)
def test_soft_overlong(tokens: int, value: float) -> None:
    """Section 5: overlong (20480, 4096)."""
    assert SoftOverlong(max_tokens=20480, buffer=4096)("", ids(tokens)) == value


def test_length_within() -> None:
    reward = LengthWithin(maximum=4, minimum=2)
    assert [reward("", ids(n)) for n in range(6)] == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    assert LengthWithin()("", []) == 1.0


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        ([1, 2, 3, 4], 0.0),
        ([1, 2, 1, 2, 1], -0.5),  # 12 21 12 21: two distinct of four
        ([7, 7, 7, 7, 7], -0.75),  # one distinct of four
        ([7], 0.0),
        ([], 0.0),
    ],
)
def test_repetition_of_bigrams(tokens: list[int], value: float) -> None:
    assert RepetitionPenalty(n=2)("", tokens) == value
    assert RepetitionPenalty(n=2, largest=2.0)("", tokens) == 2 * value


def test_repetition_of_trigrams_by_default() -> None:
    assert RepetitionPenalty()("", [1, 2, 1, 2, 1]) == pytest.approx(-1 / 3)  # 121 212 121: two distinct of three


def test_format() -> None:
    reward = Format(pattern=r"<think>.*</think><answer>\d+</answer>")
    assert reward("<think>a\nb</think><answer>4</answer>") == 1.0
    assert reward("<think></think><answer>4</answer> and more") == 0.0
    assert Format(pattern=r"\d", where="anywhere")("a 4 b") == 1.0
    assert Format(pattern=r"\d", where="anywhere")("a b") == 0.0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Format(pattern="("), r"'\(' is not a regular expression"),
        (lambda: Format(pattern="a", where="start"), "use whole or anywhere"),
        (lambda: SoftOverlong(max_tokens=4, buffer=0), "0 < buffer <= max_tokens"),
        (lambda: SoftOverlong(max_tokens=4, buffer=5), "0 < buffer <= max_tokens"),
        (lambda: LengthWithin(maximum=1, minimum=2), "minimum is 2 and maximum 1"),
        (lambda: RepetitionPenalty(n=0), "n is at least 1"),
    ],
)
def test_settings_that_cannot_work(make, told: str) -> None:
    with pytest.raises(UserError, match=told):
        make()
