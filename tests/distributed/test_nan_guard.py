"""Something that is not finite on one rank of two: both leave the update out and stay alike; rank 0 names the rank."""

from __future__ import annotations

from pathlib import Path

from benchmarks import nonfinite

TRIES = [
    ("weight", "SFT"),
    ("optimizer state", "DPO"),
    ("one gradient", "DPO"),
    ("sampler log-probs", "GRPO"),
    ("reward", "GRPO"),
]


def test_one_rank_only(tmp_path: Path) -> None:
    assert nonfinite.one_rank(TRIES, tmp_path) == []
