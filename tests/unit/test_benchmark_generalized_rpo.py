"""The study's measures by hand, and a report that says no more than its numbers."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from alignment.diversity import distinct, self_bleu
from benchmarks.generalized_rpo import clear, differences, interval, report, signed


def test_distinct_n_grams() -> None:
    """a b a, A b: two of five words; ab, ba, ab: two of three pairs. Pairs do not cross replies."""
    replies = ["a b a", "A b"]
    assert distinct(replies, 1) == 2 / 5
    assert distinct(replies, 2) == 2 / 3
    assert distinct(["a", ""], 2) == 0


def test_self_bleu_of_the_same_and_of_different_replies() -> None:
    """Of equal replies 1. Two of five words that share the first four: 4/5, 3/4, 2/3 and 1/2 of the n-grams; a prompt
    more with replies that share nothing adds 5, 4, 3 and 2 n-grams to each of those."""
    assert self_bleu([["it is red and blue ."] * 5]) == pytest.approx(1)
    alike, apart = ["it is red now ,", "it is red now ."], ["one two three four five", "six seven eight nine ten"]
    assert self_bleu([alike]) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25, abs=1e-6)
    assert self_bleu([alike, apart]) == pytest.approx((8 / 20 * 6 / 16 * 4 / 12 * 2 / 8) ** 0.25, abs=1e-6)
    assert self_bleu([apart]) == 0


def test_intervals_of_student() -> None:
    """Mean 2, deviation 1, three values: 4.303 / sqrt 3 each way."""
    low, high = interval([1.0, 2.0, 3.0]) or (0, 0)
    assert (low, high) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert not clear([1.0, 2.0, 3.0])
    assert clear([1.9, 2.0, 2.1])
    assert clear([-1.9, -2.0, -2.1])
    assert interval([1.0]) is None
    assert not clear([1.0])


def found(entropy: list[float], accuracy: list[float]) -> dict[str, Any]:
    runs = {
        "dpo": {str(s): {"accuracy": 0.5, "entropy": 1.0, "self_bleu": 0.5} for s in range(3)},
        "both": {str(s): {"accuracy": accuracy[s], "entropy": entropy[s], "self_bleu": 0.5} for s in range(3)},
    }
    plan = {"rows": 8, "data": "world:support", "batch_size": 8, "model": "x/m", "sft_rows": 0, "lora": 4, "lr": 1e-3}
    plan |= {"samples": 2, "prompts": 3, "precision": "32-true"}
    variants: dict[str, Any] = {"dpo": {"lambda_entropy": 0.0}, "both": {}}
    said = {"machine": "here", "command": "command", "plan": plan, "variants": variants, "seeds": [0, 1, 2]}
    return said | {"runs": runs, "seconds": 1.0}


def test_small_differences_do_not_look_like_none() -> None:
    assert [signed(x) for x in (0.25, -0.0006, 0.0)] == ["+0.250", "-0.001", "+0.000"]
    assert [signed(x) for x in (0.00021, -3e-7)] == ["+2e-04", "-3e-07"]


def test_differences_are_paired_by_seed() -> None:
    assert differences(found([1.5, 2.0, 2.5], [0.5] * 3), "both", "entropy") == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("entropy", "accuracy", "verdict"),
    [
        ([1.5, 1.51, 1.52], [0.6, 0.61, 0.62], "- `both`: better: accuracy +0.110; moved: entropy +0.510."),
        ([1.5, 1.51, 1.52], [0.4, 0.41, 0.42], "- `both`: worse: accuracy -0.090; moved: entropy +0.510."),
        ([0.5, 1.0, 1.5], [0.4, 0.5, 0.7], "- `both`: no difference from DPO that the seeds make clear."),
    ],
)
def test_the_report_says_what_is_clear(entropy: list[float], accuracy: list[float], verdict: str) -> None:
    text = report({"world:support": found(entropy, accuracy)})
    assert "## world:support" in text
    assert verdict in text.splitlines()
    shown = f"{statistics.mean(entropy):.3f} ± {statistics.stdev(entropy):.3f}"
    assert f"| both | {statistics.mean(accuracy):.3f} ± {statistics.stdev(accuracy):.3f} | {shown} |" in text
    assert "- `both`: the defaults of the class" in text
