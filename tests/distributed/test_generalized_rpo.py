"""GeneralizedRPO on two processes is that of one: terms, clips of components, domain weights, cached entropies."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.distributed import generalized_rpo_checks as checks
from tests.distributed.pair import of_one, of_two

Results = dict[str, Any]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Results of both ranks."""
    return of_two("generalized_rpo_checks", tmp_path_factory.mktemp("two"), timeout=240)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return of_one(checks.run_all, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", list(checks.RUNS))
def test_first_gradient(name: str, one: Results, two: list[Results]) -> None:
    expected = one[name]["gradient"]
    for rank in two:
        assert math.dist(rank[name]["gradient"], expected) <= 1e-5 * math.hypot(*expected)


@pytest.mark.parametrize("name", list(checks.RUNS))
def test_losses_metrics_and_weights(name: str, one: Results, two: list[Results]) -> None:
    """Also those of a domain that one rank never sees, and over a last batch that leaves a rank without rows."""
    expected = one[name]
    assert expected["global_step"] == len(expected["logged"]) == checks.STEPS
    if name in ("parameters", "states", "states, one pass"):
        coefficients = [expected["logged"][0][f"grad/clip_coef/{n}"] for n in ("dpo", "entropy", "smooth")]
        assert min(coefficients) < 0.99
    for rank in two:
        found = rank[name]
        assert found["global_step"] == checks.STEPS
        assert found["weights"] == 1
        for a, b in zip(found["logged"], expected["logged"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-4, abs=1e-4)
        assert found["domains"] == pytest.approx(expected["domains"], rel=1e-5)
        assert set(found["domains"]) == set("abc")
        assert len({round(q, 6) for q in found["domains"].values()}) == 3
    assert two[0][name]["logged"] == two[1][name]["logged"]
    assert two[0][name]["domains"] == two[1][name]["domains"]
