"""Two processes equal one: gradients, losses, metrics; one bad rank stops nobody. One pair of processes does it all."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.distributed import ddp_checks
from tests.distributed.pair import of_one, of_two

MODULES = tuple(ddp_checks.MODULES)
Results = dict[str, Any]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Results of both ranks."""
    return of_two("ddp_checks", tmp_path_factory.mktemp("two"), timeout=400)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return of_one(ddp_checks.run_all, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", MODULES)
def test_first_gradient(name: str, one: Results, two: list[Results]) -> None:
    """2e-6 relative, in the L2 norm."""
    expected = one[name]["gradient"]
    for rank in two:
        gap = math.dist(rank[name]["gradient"], expected)
        assert gap <= 2e-6 * math.hypot(*expected)


@pytest.mark.parametrize("name", MODULES)
def test_losses_and_metrics(name: str, one: Results, two: list[Results]) -> None:
    """Losses to 1e-5 over 20 steps with unequal token counts and a last batch that leaves a rank without rows; metrics
    of the first step and of an untrained validation to 1e-6."""
    for rank in two:
        assert len(rank[name]["logged"]) == ddp_checks.STEPS
        for a, b in zip(rank[name]["logged"], one[name]["logged"], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert rank[name]["logged"][0] == pytest.approx(one[name]["logged"][0], rel=1e-6, abs=1e-6)
        assert rank[name]["untrained"] == pytest.approx(one[name]["untrained"], rel=1e-6, abs=1e-6)
        assert rank[name]["global_step"] == one[name]["global_step"] == ddp_checks.STEPS
        assert rank[name]["val"] == pytest.approx(one[name]["val"], rel=1e-4, abs=1e-4)


def test_the_whole_batch_was_looked_at(one: Results, two: list[Results]) -> None:
    """The baseline is above 0, and the shift is the mean over as many batches as there were."""
    assert one["kto"]["logged"][0]["kl"] > 0.01
    memory = one["whole batch"]["memory"]
    assert memory["bco_batches"] == ddp_checks.STEPS
    assert abs(memory["bco_shift"]) > 1e-4
    for rank in two:
        assert rank["whole batch"]["memory"] == pytest.approx(memory, rel=1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_ranks_hold_the_same_weights(name: str, two: list[Results]) -> None:
    assert all(rank[name]["weights_equal"] for rank in two)
    assert two[0][name]["logged"] == two[1][name]["logged"]
    assert two[0][name]["val"] == two[1][name]["val"]


def test_nan_on_one_rank_skips_on_both(two: list[Results]) -> None:
    """C18, second part."""
    for rank in two:
        assert rank["one_bad_rank"] == {
            "nonfinite": 1,
            "global_step": 3,
            "weights_equal": True,
            "dumps": ["rank0.json", "rank0.safetensors", "rank1.json", "rank1.safetensors"],
        }


def test_metrics_weigh_counts_and_may_be_absent(two: list[Results]) -> None:
    """C20."""
    assert [rank["metrics"] for rank in two] == [{"x": 1.0, "only_here": 3.0}] * 2


def test_predictions_are_joined_in_order(one: Results, two: list[Results]) -> None:
    lines = [json.loads(line) for line in two[0]["predictions"]]
    expected = [json.loads(line) for line in one["predictions"]]
    assert [row["index"] for row in lines] == [0, 1, 2, 3, 4]
    for row, other in zip(lines, expected, strict=True):
        assert row["chosen"] == other["chosen"]
        assert row["reward_chosen"] == pytest.approx(other["reward_chosen"], abs=1e-5)
