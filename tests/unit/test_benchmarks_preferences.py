"""What the comparison of preference losses with TRL compares, and how it says that something differs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from alignment.losses import DPO_LOSSES
from benchmarks.performance import equality
from benchmarks.preferences.__main__ import BOUND, CASES, ONLINE, PAIRS, drawn, our_values, ours, report, sampled
from modules import DPO, OnlineDPO


def test_every_loss_is_compared_that_trl_has_too() -> None:
    named: set[str] = set()
    for _, kind, settings, _, _ in CASES:
        loss = settings.get("loss", "sigmoid" if kind in (DPO, OnlineDPO) else "simpo")
        named |= {loss} if isinstance(loss, str) else set(loss)
    assert {n for n, entry in DPO_LOSSES.items() if entry.reference} - named == {"modpo", "bco"}


def test_our_losses_are_those_that_trl_gave() -> None:
    """TRL 1.16's values of the same inputs, as the report keeps them."""
    kept = json.loads((Path(__file__).resolve().parents[2] / "reports" / "preferences.json").read_text())
    theirs = {row["what"]: row["theirs"] for row in kept}
    for (name, *_), loss in zip(CASES, our_values(), strict=True):
        assert loss == pytest.approx(theirs[f"{name}: loss"], rel=BOUND, abs=BOUND), name


def test_our_side_is_the_loss_of_what_was_drawn() -> None:
    """Pair by pair, in plain Python."""
    pairs, batch = drawn(0)
    gaps = []
    for pair in pairs:
        c, j = (sum(pair[side]["policy"]) - sum(pair[side]["reference"]) for side in ("chosen", "rejected"))
        gaps.append(math.log1p(math.exp(-0.1 * (c - j))))
    assert len(gaps) == PAIRS
    assert ours(DPO, {}, batch) == pytest.approx(sum(gaps) / PAIRS, rel=1e-6)


def test_our_side_of_online_dpo_chooses_by_the_scores() -> None:
    """IPO of summed log-ratios, in plain Python: (delta - 5)^2 of the better completion and the other one."""
    rows, made = sampled(2)
    values = []
    for row in rows:
        first, second = (sum(row[side]["policy"]) - sum(row[side]["reference"]) for side in ("first", "second"))
        sign = 1 if row["scores"][0] > row["scores"][1] else -1
        values.append((sign * (first - second) - 5) ** 2)
    assert {row["scores"][0] > row["scores"][1] for row in rows} == {True, False}
    assert ours(OnlineDPO, {"loss": "ipo_sum", **ONLINE}, made) == pytest.approx(sum(values) / PAIRS, rel=1e-5)


def test_the_report_says_what_differs() -> None:
    rows = [equality.row("a", 1.0, 1.0, 0.0, 1e-5), equality.row("b", 1.0, 2.0, 1.0, 1e-5)]
    last = report(rows).splitlines()[-2:]
    assert last == [
        "| a | 1.000000 | 1.000000 | 0.0e+00 | 1e-05 |  |",
        "| b | 1.000000 | 2.000000 | 1.0e+00 | 1e-05 | differs |",
    ]
