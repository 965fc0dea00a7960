"""The built-in support world: its shape, its splits, its judges, and that it is the same everywhere."""

from __future__ import annotations

import hashlib
import json

import pytest

from alignment import world


@pytest.mark.parametrize(
    ("kind", "digest"),
    [("sft", "178f3bb91a8fba75"), ("preference", "693d9df875930e36"), ("prompts", "ecb16d306a976053")],
)
def test_rows_are_the_same_on_every_platform(kind, digest):
    rows = [world.load(kind, split, seed=3, size=40) for split in ("train", "val", "test")]
    assert hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16] == digest


def test_first_rows_do_not_depend_on_the_size_and_another_seed_gives_other_rows():
    rows = world.load("preference", "train", size=64)
    assert world.load("preference", "train", size=20) == rows[:20]
    assert world.load("preference", "train", seed=1, size=64) != rows


def test_default_sizes():
    for kind, sizes in world.SIZES.items():
        for split, size in sizes.items():
            assert len(world.load(kind, split)) == size


@pytest.mark.parametrize("kind", ["sft", "preference", "prompts"])
def test_no_product_is_in_two_splits(kind):
    seen = {
        split: {row["product"].split()[0] for seed in (0, 1) for row in world.load(kind, split, seed=seed, size=600)}
        for split in ("train", "val", "test")
    }
    assert len(seen["train"]) > 100
    assert not seen["train"] & seen["val"]
    assert not seen["train"] & seen["test"]
    assert not seen["val"] & seen["test"]
    names = [name for split in ("train", "val", "test") for name in world.product_names(split)]
    assert len(names) == len(set(names)) == 256


def test_every_prompt_has_four_comparisons_one_for_each_aspect():
    by_prompt: dict[str, list[dict]] = {}
    for row in world.load("preference", "train", size=400):
        by_prompt.setdefault(json.dumps(row["prompt"]), []).append(row)
    for rows in by_prompt.values():
        assert len(rows) >= 3
        assert {row["aspect"] for row in rows} == set(world.ASPECTS)


def test_comparisons_say_what_their_aspect_says():
    for row in world.load("preference", "train", size=800):
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert world.right(chosen, row)
        match row["aspect"]:
            case "right":
                assert not world.right(rejected, row)
                assert world.warmth(chosen) == 1.0
            case "warm":
                assert world.right(rejected, row)
                assert world.warmth(chosen) == 1.0
                assert world.warmth(rejected) == 0.0
            case "short":
                assert world.right(rejected, row)
                assert world.length(rejected) > world.length(chosen)
            case "right_before_warm":
                assert not world.right(rejected, row)
                assert world.warmth(chosen) == 0.0
                assert world.warmth(rejected) >= 0.5


def test_the_prompt_holds_the_answer():
    for row in world.load("prompts", "test", size=300):
        label = world.ATTRIBUTES[row["attribute"]].label
        assert f"{label}: {row['answer']}." in row["prompt"][0]["content"]
        assert row["answer"] not in row["prompt"][1]["content"]
        assert row["product"] in row["prompt"][1]["content"]


def test_no_number_is_a_value_of_two_kinds():
    numbers = [value.split()[0] for a in world.ATTRIBUTES.values() if a.unit for value in a.values]
    assert len(numbers) == len(set(numbers))


def test_the_support_log_mixes_styles_and_is_mostly_right():
    rows = world.load("sft", "train", size=1000)
    assert [m["role"] for m in rows[0]["messages"]] == ["system", "user", "assistant"]
    right = sum(world.right(row["messages"][-1]["content"], row) for row in rows)
    assert 870 <= right <= 930  # one in ten is wrong: 900 +- 3 standard deviations
    styles = ("warm", "curt", "plain", "padded")
    shares = {style: sum(row["style"] == style for row in rows) / len(rows) for style in styles}
    assert shares["warm"] == pytest.approx(0.2, abs=0.04)
    assert shares["curt"] == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize(
    ("attribute", "answer", "reply", "expected"),
    [
        ("warranty", "3 years", "Your lamp is covered for 3 years.", True),
        ("warranty", "3 years", "It has a three-year warranty!", True),
        ("warranty", "3 years", "Three years.", True),
        ("warranty", "3 years", "Your lamp is covered for 5 years.", False),
        ("warranty", "3 years", "It is 3 years, or 5 years if you register.", False),
        ("warranty", "3 years", "Covered for 13 years.", False),
        ("warranty", "3 years", "Three.", False),
        ("warranty", "3 years", "I am not sure about that.", False),
        ("warranty", "3 years", "", False),
        ("price", "49 dollars", "It costs $49.", True),
        ("price", "49 dollars", "It costs $49.00 with 2 years of warranty.", True),
        ("price", "49 dollars", "It costs 49 dollars.", True),
        ("price", "49 dollars", "It costs $149.", False),
        ("price", "49 dollars", "It costs $49.50.", False),
        ("price", "49 dollars", "It costs 49 minutes.", False),
        ("colours", "red and blue", "You can have it in blue or red.", True),
        ("colours", "red and blue", "We have red.", False),
        ("colours", "red and blue", "Red, blue and green.", False),
        ("colours", "black and grey", "It comes in Gray and Black.", True),
        ("returns", "30 days", "You have thirty days; delivery takes 3 days.", False),
        ("weight", "150 grams", "A 150-gram device.", True),
    ],
)
def test_right(attribute, answer, reply, expected):
    assert world.right(reply, {"attribute": attribute, "answer": answer}) is expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("3 years. See the page.", 0.0),
        ("Thank you!", 0.5),
        ("Happy to help! It costs $3. Let me know if you need anything else.", 1.0),
        ("Thanks, glad you asked! Feel free to write. Enjoy your day!", 1.0),
        ("", 0.0),
    ],
)
def test_warmth(reply, expected):
    assert world.warmth(reply) == expected


def test_length_counts_words():
    assert world.length("It costs  49 dollars.") == 4


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("dpo", "train"), "sft, preference, prompts"),
        (("sft", "dev"), "train, val, test"),
        (("sft", "train", 0, 0), "at least 1"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(arguments, names):
    with pytest.raises(ValueError, match=names):
        world.load(*arguments)
