"""Contradictions, doubtful labels, the length of what wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment.quality.label_noise import confident_noise, contradictions, label_noise
from alignment.quality.length_bias import length_bias
from alignment.quality.settings import Settings
from tests.quality_toys import corpus, pair

FLIPPED = (7, 20, 33)


def preferences() -> list[dict[str, Any]]:
    """60 prompts; the kind reply wins, but for three."""
    out = []
    for i in range(60):
        kind, rude = f"Gladly, kind friend, here is item {i}.", f"Rubbish, go and find item {i} alone."
        out.append(pair(f"Where is item {i}?", *((rude, kind) if i in FLIPPED else (kind, rude))))
    return out


def test_opposite_and_circular_judgements(tmp_path: Path) -> None:
    rows = [
        pair("Why?", "Because.", "Dunno."),
        pair("why?", "dunno.", "Because."),  # the other way round
        pair("How?", "One.", "Two."),
        pair("How?", "Two.", "Three."),
        pair("How?", "Three.", "One."),  # closes a circle
        pair("How?", "One.", "Four."),  # leads out of it
        pair("When?", "One.", "Two."),  # the texts of the circle, of another prompt
        pair("When?", "Two.", "Three."),
    ]
    found = contradictions(corpus(tmp_path, rows), Settings())
    opposite, cyclic = found.faults
    assert opposite.places == ["row 1 ≠ row 2", "row 2 ≠ row 1"]
    assert cyclic.places == ["row 3", "row 4", "row 5"]
    assert found.value == pytest.approx(5 / 8)
    assert found.verdict == "fail"


def test_opposite_labels(tmp_path: Path) -> None:
    labelled = [("Why?", "Because.", True), ("Why?", "Because.", False), ("Why?", "No.", False), ("How?", "No.", True)]
    rows = [{"prompt": p, "completion": c, "label": good} for p, c, good in labelled]
    found = contradictions(corpus(tmp_path, rows), Settings())
    assert found.faults[0].places == ["row 1 ≠ row 2", "row 2 ≠ row 1"]
    assert found.value == 0.5
    assert contradictions(corpus(tmp_path, [{"prompt": "Why?"}]), Settings()).verdict == "n/a"


def test_confident_joint_by_hand() -> None:
    """Bars: mean P(good) of the good ones (0.9 + 0.9 + 0.8 + 0.1) / 4 = 0.675, mean P(bad) of the bad ones
    (0.9 + 0.8 + 0.8 + 0.1) / 4 = 0.65. Row 3 clears the bar of bad, row 7 that of good: one of four in each."""
    good = np.array([True] * 4 + [False] * 4)
    estimate, off = confident_noise(good, np.array([0.9, 0.9, 0.8, 0.1, 0.1, 0.2, 0.2, 0.9]))
    assert np.flatnonzero(off).tolist() == [3, 7]
    assert estimate == pytest.approx(0.25)


def test_rows_that_clear_no_bar_are_not_counted() -> None:
    """Bars 0.6 and 0.8. Of the good ones 0.9 and 0.75 count as good, 0.15 as bad, 0.6 (at the bar) as good: 1 of 4
    counted, and of five rows in all four are good ones: 0.25 * 0.8."""
    good = np.array([True, True, True, True, False])
    estimate, off = confident_noise(good, np.array([0.9, 0.75, 0.15, 0.6, 0.2]))
    assert np.flatnonzero(off).tolist() == [2]
    assert estimate == pytest.approx(0.2)


def test_flipped_pairs_are_doubted(tmp_path: Path) -> None:
    """Words tell the replies apart, so the model is right for all but the three, which are 3 of 60 for certain."""
    found = label_noise(corpus(tmp_path, preferences()), Settings())
    assert found.figures["accuracy"] == pytest.approx(57 / 60)
    assert sorted(place.split(" (")[0] for place in found.faults[0].places) == sorted(f"row {i + 1}" for i in FLIPPED)
    assert found.value == pytest.approx(3 / 60)
    assert found.verdict == "ok"


def test_flipped_labels_are_doubted(tmp_path: Path) -> None:
    rows = []
    for i, row in enumerate(preferences()):
        for good, name in ((True, "chosen"), (False, "rejected")):
            rows.append({"prompt": f"{row['prompt']} {i} {name}", "completion": row[name], "label": good})
    found = label_noise(corpus(tmp_path, rows), Settings())
    flipped = {f"row {2 * i + 1 + k}" for i in FLIPPED for k in (0, 1)}
    assert {place.split(" (")[0] for place in found.faults[0].places} == flipped
    assert found.value == pytest.approx(3 / 60)


@pytest.mark.parametrize("rows", [preferences()[:49], [pair(f"Q {i}?", "Same a.", "Same b.") for i in range(4)] * 20])
def test_too_little_to_judge(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """49 pairs; 80 pairs of 4 prompts, which no five folds can keep apart."""
    found = label_noise(corpus(tmp_path, rows), Settings())
    assert found.verdict == "n/a"
    assert "judgements of" in found.measured


def test_a_model_that_cannot_tell_is_not_believed(tmp_path: Path) -> None:
    """Whichever reply stands first won: words say nothing about it."""
    rows = [pair(f"Number {i}?", *(("Red.", "Blue.") if i % 2 else ("Blue.", "Red."))) for i in range(60)]
    found = label_noise(corpus(tmp_path, rows), Settings())
    assert (found.value, found.verdict) == (None, "n/a")
    assert "too seldom to judge" in found.measured


# ---------------------------------------------------------------------- length


def test_the_longer_one_wins(tmp_path: Path) -> None:
    """80 of 100 pairs: the interval begins at 0.711. By 80 x 4 and 20 x -4 characters: 2.4 on average."""
    rows = [pair(f"Question {i}?", *(("12345678", "1234") if i < 80 else ("1234", "12345678"))) for i in range(100)]
    rows += [pair("Equal?", "1234", "4321")]
    found = length_bias(corpus(tmp_path, rows), Settings())
    assert found.figures["accuracy"] == 0.8
    assert found.figures["accuracy_low"] == pytest.approx(0.7112, abs=1e-4)
    assert found.value == found.figures["accuracy_low"]
    assert found.figures["mean_difference"] == pytest.approx(240 / 101)
    assert found.figures["longer"] == pytest.approx(80 / 101)
    assert found.figures["equal"] == pytest.approx(1 / 101)
    assert found.verdict == "fail"
    assert found.faults[0].count == 80


def test_shorter_is_a_bias_too_and_few_pairs_are_none(tmp_path: Path) -> None:
    rows = [pair(f"Question {i}?", "12", "1234") for i in range(100)]
    found = length_bias(corpus(tmp_path, rows), Settings())
    assert found.value == pytest.approx(100 / (100 + 1.959964**2))  # Wilson's bound for none of n: n / (n + z²)
    assert found.verdict == "fail"
    assert found.faults[0].what.startswith("the shorter one wins")
    few = length_bias(corpus(tmp_path, [*rows[:2], pair("Why?", "12345", "1")]), Settings())
    assert (few.value, few.verdict) == (0.5, "ok")
    assert length_bias(corpus(tmp_path, [{"prompt": "Why?"}]), Settings()).verdict == "n/a"
