"""Scores of several rewards by hand, against torchjd, with abstentions; the ideal point; mistakes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor
from torchjd.scalarization import STCH

from alignment.errors import UserError
from alignment.scalarise import Scalariser

NAN = float("nan")
NAMES = ("a", "b")
REWARDS = torch.tensor([[0.2, 0.9], [0.8, 0.6], [1.0, 0.0]], dtype=torch.float64)
HALF = torch.full((3, 2), 0.5, dtype=torch.float64)
ONES = {"a": 1.0, "b": 1.0}


def test_scores_by_hand() -> None:
    """Shortfalls, weighted: (.4, .05), (.1, .2), (0, .5)."""
    assert Scalariser("weighted_sum", None, NAMES)(REWARDS, HALF).tolist() == pytest.approx([0.55, 0.7, 0.5])
    plain = Scalariser("chebyshev", None, NAMES, ONES)(REWARDS, HALF)
    assert plain.tolist() == pytest.approx([-0.4, -0.2, -0.5])
    smooth = Scalariser("smooth_chebyshev", {"mu": 0.1}, NAMES, ONES)(REWARDS, HALF)
    expected = [-0.1 * math.log(math.exp(a) + math.exp(b)) for a, b in ((4, 0.5), (1, 2), (0, 5))]
    assert smooth.tolist() == pytest.approx(expected)
    near = Scalariser("smooth_chebyshev", {"mu": 1e-4}, NAMES, ONES)(REWARDS, HALF)
    assert near.tolist() == pytest.approx(plain.tolist(), abs=1e-4)


def test_weights_differ_by_completion() -> None:
    """A preference: all on a, all on b, three quarters on a. A reward without weight does not count, not even as 0."""
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.75, 0.25]])
    scores = Scalariser("chebyshev", None, NAMES, {"a": 0.1, "b": 2.0})(REWARDS, weights)
    assert scores.tolist() == pytest.approx([0.1, -1.4, -0.5])


def test_the_smooth_form_is_torchjds() -> None:
    ours = Scalariser("smooth_chebyshev", {"mu": 0.3}, NAMES, ONES)(REWARDS, HALF)
    for row, score in zip(REWARDS, ours, strict=True):
        theirs = STCH(mu=0.3, weights=HALF[0], reference=-torch.ones(2, dtype=torch.float64))(-row)
        assert float(score) == pytest.approx(-float(theirs))


@pytest.mark.parametrize("method", ["weighted_sum", "chebyshev", "smooth_chebyshev"])
def test_abstentions(method: str) -> None:
    """What abstained is not there; where every reward did there is no score. A single reward's score is its own."""
    rewards = torch.tensor([[0.2, NAN], [NAN, NAN], [NAN, 0.6]])
    found = Scalariser(method, None, NAMES, ONES)(rewards, HALF).tolist()
    lowered = 0.0 if method == "weighted_sum" else 0.5
    assert [found[0], found[2]] == pytest.approx([0.1 - lowered, 0.3 - lowered])
    assert math.isnan(found[1])
    assert Scalariser(method, None, NAMES)(torch.zeros(0, 2), torch.zeros(0, 2)).tolist() == []
    unseen = Scalariser(method, None, NAMES)(torch.tensor([[0.5, NAN]]), torch.ones(1, 2))
    assert math.isfinite(float(unseen))


def test_the_ideal_point_is_the_best_so_far() -> None:
    method = Scalariser("chebyshev", None, NAMES)
    assert method(REWARDS, HALF).tolist() == pytest.approx([-0.4, -0.15, -0.45])  # best 1 and .9
    assert method(REWARDS[:1] + 1, HALF[:1]).tolist() == pytest.approx([0])  # now 1.2 and 1.9
    assert method(REWARDS[2:], HALF[2:]).tolist() == pytest.approx([-0.95])
    assert method(torch.full((1, 2), NAN), HALF[:1]).isnan().all()
    assert method.ideal.tolist() == pytest.approx([1.2, 1.9])
    half_given = Scalariser("chebyshev", None, NAMES, {"b": 0.5})
    half_given(REWARDS, HALF)
    assert half_given.ideal.tolist() == [1.0, 0.5]


def test_state_goes_by_name() -> None:
    method = Scalariser("chebyshev", None, NAMES)
    method(REWARDS, HALF)
    state = json.loads(json.dumps(method.state_dict()))
    other = Scalariser("chebyshev", None, ("b", "new", "a"), {"a": 7.0})
    other.load_state_dict(state)
    assert other.ideal.tolist() == [0.9, -math.inf, 7.0]


def worst(rewards: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    """A user's own."""
    return rewards.amin(1)


def one(rewards: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    return rewards[:1, 0]


def test_a_method_of_ones_own() -> None:
    assert Scalariser("tests.unit.test_scalarise.worst", None, NAMES)(REWARDS, HALF).tolist() == [0.2, 0.6, 0]
    with pytest.raises(ValueError, match=r"returned \(1,\) for 3 completions"):
        Scalariser("tests.unit.test_scalarise.one", None, NAMES)(REWARDS, HALF)


def test_mistakes() -> None:
    with pytest.raises(UserError, match=r"'chebishev' is not known, did you mean 'chebyshev'\?"):
        Scalariser("chebishev", None, NAMES)
    with pytest.raises(UserError, match="'chebyshev' has no setting mu"):
        Scalariser("chebyshev", {"mu": 1.0}, NAMES)
    with pytest.raises(UserError, match="ideal names c, no reward; there are a, b"):
        Scalariser("chebyshev", None, NAMES, {"c": 1.0})
    with pytest.raises(UserError, match="mu is 0"):
        Scalariser("smooth_chebyshev", {"mu": 0}, NAMES)(REWARDS, HALF)
