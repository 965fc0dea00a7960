"""`token_rewards` as our command line calls rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.performance import token_rewards


def cheap(completion_ids: list[int], columns: Mapping[str, Any], completion: str) -> float:
    return token_rewards.cheap(completion_ids, columns["flat"])


def slow(completion_ids: list[int], columns: Mapping[str, Any], completion: str) -> float:
    return token_rewards.slow(completion_ids, columns["flat"])


def raising(completion_ids: list[int], columns: Mapping[str, Any], completion: str) -> float:
    return token_rewards.raising(completion_ids, columns["flat"])
