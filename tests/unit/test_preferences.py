"""Preferences of prompts: what is drawn, what the policy reads, what rewards weigh; mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.preferences import PREFERENCE, PreferenceConfig, Preferences, rounded

NAMES = ("kind", "short", "right")
ASKED = [Group(prompt=[1, 50, 51], completions=(), columns={"answer": "x"}, index=i) for i in range(40)]


def preferences(seed: int = 0, names: Sequence[str] = NAMES, **settings: Any) -> Preferences:
    return Preferences(PreferenceConfig(**settings), names, seed)


def shares(groups: Sequence[Group]) -> list[list[float]]:
    return [[g.columns[PREFERENCE][name] for name in NAMES] for g in groups]


def test_rounding_keeps_the_sum() -> None:
    assert rounded([1 / 3, 1 / 3, 1 / 3], 1) == [0.4, 0.3, 0.3]  # ties go to the earlier
    assert rounded([0.14, 0.17, 0.69], 1) == [0.1, 0.2, 0.7]
    assert rounded([0.996, 0.002, 0.002], 2) == [1.0, 0.0, 0.0]


def test_what_the_policy_reads(tiny_tokenizer: Any) -> None:
    """After the BOS, in front of everything else; the numbers are those that rewards are weighed with."""
    told = preferences().condition(ASKED, 3, tiny_tokenizer)
    for before, after in zip(ASKED, told, strict=True):
        assert (after.prompt[0], after.prompt[-2:]) == (1, [50, 51])
        text = tiny_tokenizer.decode(after.prompt[1:-2])
        share = after.columns[PREFERENCE]
        assert text == f"[kind {share['kind']:.1f}, short {share['short']:.1f}, right {share['right']:.1f}] "
        assert after.columns["answer"] == "x"
        assert (after.index, before.columns) == (before.index, {"answer": "x"})
    for row in shares(told):
        assert sum(row) == pytest.approx(1)
        assert all(value * 10 == pytest.approx(round(value * 10)) for value in row)
    without_bos = preferences(template="{shares}: ").condition([Group(prompt=[60], completions=())], 3, tiny_tokenizer)
    assert tiny_tokenizer.decode(without_bos[0].prompt).startswith("kind 0")


def test_draws_are_keyed(tiny_tokenizer: Any) -> None:
    """By seed, batch number and prompt; not by what stands beside it, nor by what was drawn before."""
    told = shares(preferences().condition(ASKED, 3, tiny_tokenizer))
    assert shares(preferences().condition(ASKED[7:9], 3, tiny_tokenizer)) == told[7:9]
    assert told != shares(preferences().condition(ASKED, 4, tiny_tokenizer))
    assert told != shares(preferences(seed=1).condition(ASKED, 3, tiny_tokenizer))
    nameless = [Group(prompt=[1, 50 + i], completions=()) for i in range(20)]
    known = shares(preferences().condition(nameless, 3, tiny_tokenizer))
    assert len({tuple(row) for row in known}) > 5
    assert shares(preferences().condition(nameless[4:5], 3, tiny_tokenizer)) == known[4:5]


def test_concentration(tiny_tokenizer: Any) -> None:
    """The largest of three shares is 11/18 on average under a uniform draw; it grows and shrinks with the setting."""
    mean = {}
    for concentration in (0.1, 1.0, 50.0):
        drawn = preferences(concentration=concentration, decimals=3)
        told = [row for step in range(20) for row in shares(drawn.condition(ASKED, step, tiny_tokenizer))]
        mean[concentration] = sum(map(max, told)) / len(told)
    assert mean[1.0] == pytest.approx(11 / 18, abs=0.02)
    assert mean[0.1] > 0.85
    assert mean[50.0] < 0.42


def test_evaluation_asks_one_thing(tiny_tokenizer: Any) -> None:
    equal = shares(preferences().condition(ASKED, None, tiny_tokenizer))
    assert equal == [[1 / 3] * 3] * len(ASKED)
    given = preferences(evaluation={"short": 0.75, "kind": 0.25}, decimals=2)
    told = given.condition(ASKED[:1], None, tiny_tokenizer)
    assert shares(told) == [[0.25, 0.75, 0.0]]
    assert "kind 0.25, short 0.75, right 0.00" in tiny_tokenizer.decode(told[0].prompt)


def test_weights_by_hand() -> None:
    """K times the share times the weight: equal shares change nothing."""
    told = [{"kind": 1 / 3, "short": 1 / 3, "right": 1 / 3}, {"kind": 0.5, "short": 0.5, "right": 0.0}]
    groups = [Group(prompt=[1], completions=[[5]] * (k + 1), columns={PREFERENCE: t}) for k, t in enumerate(told)]
    weights = preferences().weights(GroupBatch.from_groups(groups), torch.tensor([1.0, 2.0, 4.0]))
    assert weights.tolist() == [pytest.approx(row) for row in ([1, 2, 4], [1.5, 3, 0], [1.5, 3, 0])]
    assert preferences().weights(GroupBatch.from_groups([]), torch.ones(3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concentration": 0}, "concentration is 0"),
        ({"decimals": 0}, "decimals is 0; it is between 1 and 4"),
        ({"template": "be nice: "}, r"has no \{shares\}"),
        ({"evaluation": {"rude": 1.0}}, "names rude, no reward of kind, short, right"),
        ({"evaluation": {"kind": 0.5}}, "sum to 1"),
        ({"evaluation": {"kind": 1.5, "short": -0.5}}, "at least 0"),
        ({"names": ["kind"]}, "there is one"),
    ],
)
def test_mistakes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        preferences(**settings)
