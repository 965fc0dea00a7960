"""The support world's judges as rewards, and that a worker needs no torch for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from alignment.rewards.calls import wanted
from alignment.rewards.specs import needed
from alignment.rewards.support import right, warmth
from benchmarks.multi_reward.support import professionalism


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("The warranty on the Velora lamp is 3 years.", 1.0),
        ("Three years.", 1.0),
        ("It has a warranty of 4 years.", 0.0),
        ("3 years or 4 years.", 0.0),  # naming every value does not help
        ("I cannot say.", 0.0),
        ("", 0.0),
    ],
)
def test_right(reply: str, value: float) -> None:
    assert right(reply, "3 years", "warranty") == value


def test_a_row_that_does_not_say_what_is_right() -> None:
    assert [right("3 years.", None, "warranty"), right("3 years.", "3 years", None)] == [None, None]
    with pytest.raises(ValueError, match="attribute is 'tone'; the support world has price, warranty"):
        right("3 years.", "3 years", "tone")


def test_what_they_read_of_a_row_is_known_before_the_first_call() -> None:
    assert [needed(wanted(reward)) for reward in (right, warmth)] == [{"answer", "attribute"}, set()]
    assert needed(wanted(professionalism)) == {"answer", "attribute"}


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("3 years.", 0.0),
        ("Thank you for your question! It costs 3 dollars.", 0.5),  # thanks
        ("Happy to help! 3 years. I hope you enjoy it!", 1.0),  # gladness, a good wish
        ("Thanks! Happy to help. Feel free to ask. Enjoy!", 1.0),  # four of them, and no more than 1
    ],
)
def test_warmth(reply: str, value: float) -> None:
    assert warmth(reply) == value


def test_a_worker_needs_no_torch() -> None:
    code = "import sys, alignment.rewards.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
