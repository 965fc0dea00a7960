"""Losses against hand-derived values and the golden tables [G-DPO] and [G-RM]; cases C7."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.losses import (
    DPO_LOSSES,
    PairLogRatios,
    aggregate,
    bradley_terry,
    centring,
    dpo_loss,
    length_desensitised,
    share,
    token_nll,
)
from alignment.pair_objective import PairObjective


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def golden_pairs() -> PairLogRatios:
    policy_chosen, policy_rejected = tensor(-10, -20, -15), tensor(-12, -19, -9)
    reference_chosen, reference_rejected = tensor(-11, -20.5, -14), tensor(-11.5, -18.2, -9.4)
    return PairLogRatios(
        chosen=policy_chosen - reference_chosen,
        rejected=policy_rejected - reference_rejected,
        chosen_tokens=tensor(5, 8, 3),
        rejected_tokens=tensor(6, 4, 3),
    )


GOLDEN = [
    ("sigmoid", 0.1, 0.0, (0.620957, 0.630258, 0.765595), 0.672270),
    ("hinge", 0.1, 0.0, (0.85, 0.87, 1.14), 0.953333),
    ("ipo", 0.1, 0.0, (22.246944, 22.443906, 29.884444), 24.858432),
    ("ipo_sum", 0.1, 0.0, (12.25, 13.69, 40.96), 22.3),
    ("sigmoid", 0.1, 0.1, (0.635957, 0.643258, 0.751595), 0.676937),
    ("robust", 0.1, 0.1, (0.602207, 0.614008, 0.783095), 0.666437),
    ("sigmoid_norm", 0.1, 0.0, (0.679081, 0.680108, 0.716753), 0.691981),
    ("sigmoid_norm", 5.0, 0.0, (0.217142, 0.238345, 2.425887), 0.960458),
]


@pytest.mark.parametrize(("name", "beta", "smoothing", "per_pair", "mean"), GOLDEN)
def test_golden_values(name: str, beta: float, smoothing: float, per_pair: tuple[float, ...], mean: float) -> None:
    loss = PairObjective(name, beta=beta, label_smoothing=smoothing)(golden_pairs(), beta, smoothing)
    torch.testing.assert_close(loss, tensor(*per_pair), atol=1e-6, rtol=0)
    assert float(loss.mean()) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(("beta", "mean"), [(0.05, 0.682095), (0.08, 0.676053), (0.2, 0.656281)])
def test_sigmoid_at_other_betas(beta: float, mean: float) -> None:
    assert float(DPO_LOSSES["sigmoid"].fn(golden_pairs(), beta, 0.0).mean()) == pytest.approx(mean, abs=1e-6)


def test_slope_of_sigmoid() -> None:
    """dL/ddelta = -beta sigmoid(-beta delta)."""
    chosen = tensor(1, 0.5, -1).requires_grad_()
    one = torch.ones(3, dtype=torch.float64)
    pairs = PairLogRatios(chosen=chosen, rejected=tensor(-0.5, -0.8, 0.4), chosen_tokens=one, rejected_tokens=one)
    DPO_LOSSES["sigmoid"].fn(pairs, 0.1, 0.0).sum().backward()
    torch.testing.assert_close(chosen.grad, tensor(-0.046257, -0.046755, -0.053494), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "slope"),
    # At delta = 0 with one token each, by hand, for beta 0.1 and smoothing 0.1 where the loss has it. Robust has
    # (-(1 - e) - e) beta/2 / (1 - 2e).
    [
        ("sigmoid", -0.1 / 2 * (1 - 2 * 0.1)),
        ("robust", -0.1 / 2 / (1 - 2 * 0.1)),
        ("sigmoid_norm", -0.1 / 2 * (1 - 2 * 0.1)),
        ("hinge", -0.1),
        ("ipo", 2 * (0 - 5.0)),
        ("ipo_sum", 2 * (0 - 5.0)),
    ],
)
def test_slope_at_the_start(name: str, slope: float) -> None:
    smoothing = 0.1 if DPO_LOSSES[name].max_smoothing else 0.0
    chosen = tensor(0).requires_grad_()
    one = tensor(1)
    pairs = PairLogRatios(chosen=chosen, rejected=tensor(0), chosen_tokens=one, rejected_tokens=one)
    DPO_LOSSES[name].fn(pairs, 0.1, smoothing).sum().backward()
    assert float(chosen.grad) == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize(("name", "value"), [("sigmoid", 0.437488), ("hinge", 0.4), ("ipo", 1.0)])
def test_loss_option_reaches_the_loss(name: str, value: float) -> None:
    """C7: beta 0.1, one token each side, margin 6."""
    one = tensor(1)
    pairs = PairLogRatios(chosen=tensor(6), rejected=tensor(0), chosen_tokens=one, rejected_tokens=one)
    assert float(DPO_LOSSES[name].fn(pairs, 0.1, 0.0)) == pytest.approx(value, abs=1e-4)


def test_ipo_divides_each_side_by_its_own_length() -> None:
    """C7: chosen log-ratio 8 over 4 tokens, rejected 2 over 1: (2 - 2 - 5)^2."""
    pairs = PairLogRatios(chosen=tensor(8), rejected=tensor(2), chosen_tokens=tensor(4), rejected_tokens=tensor(1))
    assert float(DPO_LOSSES["ipo"].fn(pairs, 0.1, 0.0)) == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("name", "beta", "smoothing", "word"),
    [
        ("sigmod", 0.1, 0.0, "available"),
        ("sigmoid", 0.0, 0.0, "positive"),
        ("robust", 0.1, 0.5, "< 0.5"),
        ("sigmoid", 0.1, -0.1, "label_smoothing"),
        ("hinge", 0.1, 0.1, "does not use"),
    ],
)
def test_settings_a_loss_is_not_defined_for(name: str, beta: float, smoothing: float, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        PairObjective(name, beta=beta, label_smoothing=smoothing)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="exists already"):
        dpo_loss("sigmoid")(DPO_LOSSES["sigmoid"].fn)


def test_length_desensitised_weights() -> None:
    """Chosen of 4 tokens (the second unscored), rejected of 2: the third scored token of the chosen is beyond."""
    group = Group(prompt=[1], completions=[[5, 6, 7, 8], [5, 6]], scored=[[True, False, True, True], [True, True]])
    weights = length_desensitised(GroupBatch.from_groups([group, group]), 0.25)
    assert weights.tolist() == [1, 1, 1, 0.25, 1, 1] * 2


def test_bradley_terry_with_margin_and_centring() -> None:
    chosen, rejected = tensor(2.0, 0.0), tensor(1.0, 0.0)
    torch.testing.assert_close(bradley_terry(chosen, rejected), tensor(math.log1p(math.exp(-1)), math.log(2)))
    torch.testing.assert_close(bradley_terry(chosen, rejected, tensor(1, 1)), tensor(math.log(2), math.log1p(math.e)))
    assert centring(chosen, rejected).tolist() == [9.0, 0.0]


@pytest.mark.parametrize(
    ("how", "expected"), [("mean", (1.033333, 0.233333)), ("min", (0.8, -0.4)), ("uwo", (1.012222, 0.092222))]
)
def test_golden_ensemble_aggregation(how: str, expected: tuple[float, float]) -> None:
    scores = torch.tensor([[1, 0.8, 1.3], [0.2, 0.9, -0.4]], dtype=torch.float64)
    torch.testing.assert_close(aggregate(scores, how), tensor(*expected), atol=1e-6, rtol=0)  # type: ignore[arg-type]


def test_unknown_aggregation() -> None:
    with pytest.raises(ValueError, match="use mean, min or uwo"):
        aggregate(torch.zeros(1, 2), "median")  # type: ignore[arg-type]


def test_share_drops_rows_of_weight_zero() -> None:
    values = torch.tensor([2.0, math.nan, 4.0], requires_grad=True)
    part = share(values, torch.tensor([1.0, 0.0, 0.5]), 8.0)
    part.backward()
    assert float(part.detach()) == pytest.approx(4.0 / 8)
    assert values.grad is not None
    assert values.grad.tolist() == [1 / 8, 0.0, 0.5 / 8]


def test_share_of_nothing_is_zero_with_a_graph() -> None:
    values = torch.tensor([2.0], requires_grad=True)
    part = share(values, torch.tensor([0.0]), 0.0)
    part.backward()
    assert float(part.detach()) == 0.0
    assert values.grad is not None
    assert values.grad.tolist() == [0.0]


def test_share_of_an_unknown_whole_is_not_finite() -> None:
    assert math.isnan(float(share(torch.tensor([2.0]), torch.tensor([math.nan]), math.nan)))


def test_token_nll_is_zero_where_unscored() -> None:
    logps = torch.tensor([-1.0, math.nan, -3.0])
    assert token_nll(logps, torch.tensor([True, False, True])).tolist() == [1.0, 0.0, 3.0]
