"""What the comparison of preference losses with TRL compares, and how it says that something differs."""

from __future__ import annotations

import math

import pytest

from alignment.losses import DPO_LOSSES
from benchmarks.performance import equality
from benchmarks.preferences.__main__ import CASES, PAIRS, drawn, ours, report
from modules import DPO


def test_every_loss_is_compared_that_trl_has_too() -> None:
    named: set[str] = set()
    for _, kind, settings, _, _ in CASES:
        loss = settings.get("loss", "sigmoid" if kind is DPO else "simpo")
        named |= {loss} if isinstance(loss, str) else set(loss)
    assert {n for n, entry in DPO_LOSSES.items() if entry.reference} - named == {"ipo_sum", "modpo", "bco"}


def test_our_side_is_the_loss_of_what_was_drawn() -> None:
    """Pair by pair, in plain Python."""
    pairs, batch = drawn(0)
    gaps = []
    for pair in pairs:
        c, j = (sum(pair[side]["policy"]) - sum(pair[side]["reference"]) for side in ("chosen", "rejected"))
        gaps.append(math.log1p(math.exp(-0.1 * (c - j))))
    assert len(gaps) == PAIRS
    assert ours(DPO, {}, batch) == pytest.approx(sum(gaps) / PAIRS, rel=1e-6)


def test_the_report_says_what_differs() -> None:
    rows = [equality.row("a", 1.0, 1.0, 0.0, 1e-5), equality.row("b", 1.0, 2.0, 1.0, 1e-5)]
    last = report(rows).splitlines()[-2:]
    assert last == [
        "| a | 1.000000 | 1.000000 | 0.0e+00 | 1e-05 |  |",
        "| b | 1.000000 | 2.000000 | 1.0e+00 | 1e-05 | differs |",
    ]
