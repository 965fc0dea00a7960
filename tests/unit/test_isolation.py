"""What conflicting rewards do to the trunk, by hand, from inner products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alignment.components import Objectives
from alignment.errors import UserError
from alignment.isolation import WATCHED, Isolation, IsolationConfig

G = torch.tensor([[1.0, 0.0], [-0.5, 1.0]], dtype=torch.float64)
"""G-GRAD of ALGORITHMS section 9: two gradients of cosine -.447214."""
EVEN = torch.tensor([0.5, 0.5])


def found(gradients: Tensor, names: tuple[str, ...] = ("a", "b")) -> Objectives:
    return Objectives(names=names, gram=gradients @ gradients.T, losses=torch.zeros(len(names), dtype=torch.float64))


def direction(
    gradients: Tensor, weights: tuple[float, ...] = (1.0, 1.0), alpha: Tensor = EVEN, **config: object
) -> list:
    names = ("a", "b", "c")[: len(gradients)]
    isolation = Isolation(IsolationConfig(**config), dict(zip(names, weights, strict=True)))  # type: ignore[arg-type]
    chosen, _ = isolation.coefficients(found(gradients, names), alpha)
    return (chosen @ gradients).tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0.5, 1.0]),
        ({"mode": "project", "threshold": 0.0}, [0.8, 1.4]),  # PCGrad: (.8, .4) and (0, 1)
        ({"mode": "project", "threshold": 0.25}, [0.8, 1.4]),
        ({"mode": "project", "threshold": 0.45}, [0.5, 1.0]),  # within the dead zone
        ({"mode": "gradvac", "threshold": 0.25}, [0.954919, 1.606559]),
        ({"mode": "scale", "threshold": 0.25}, [0.125, 0.25]),
        ({"mode": "block", "threshold": 0.45}, [0.5, 1.0]),
    ],
)
def test_modes_by_hand(config: dict[str, object], expected: list[float]) -> None:
    assert direction(G, **config) == pytest.approx(expected, abs=1e-6)


def test_block_keeps_the_reward_of_larger_weight() -> None:
    """Two rewards always oppose each other alike, so both would be blocked."""
    assert direction(G, (1.0, 2.0), mode="block") == pytest.approx([-1.0, 2.0])
    assert direction(G, (2.0, 1.0), mode="block") == pytest.approx([2.0, 0.0])
    # Of three, (-1, -1) opposes the sum (1, 1) of the others; they do not oppose theirs: (1, 0).(-1, 0) = -1 does.
    three = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.4, -0.4]], dtype=torch.float64)
    # sums of the others: (-.4, .6), (.6, -.4), (1, 1); cosines -.5547, -.5547, -1: all blocked, the last weighs most
    assert direction(three, (1.0, 1.0, 3.0), mode="block") == pytest.approx([-1.2, -1.2])
    # with threshold .6 only the last is
    assert direction(three, (1.0, 1.0, 3.0), mode="block", threshold=0.6) == pytest.approx([1.0, 1.0])


def test_gate_goes_by_the_fusion_weights() -> None:
    assert direction(G, mode="gate", alpha=torch.tensor([0.2, 0.8])) == pytest.approx([-0.5, 1.0])


def test_opposed_rewards_deadlock_under_projection() -> None:
    """Cosine -1: each loses all it has, the trunk serves neither. The reason why isolation is off unless asked for."""
    opposed = torch.tensor([[1.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    assert direction(opposed, mode="project") == pytest.approx([0.0, 0.0])
    assert direction(opposed) == [-1.0, 0.0]


def test_ratio_control_by_hand() -> None:
    """Lengths 1 and 3 with shares 1 : 1: s = (4/2) / n = 2 and 2/3. With 1 : 3 both are 1. The bounds are 1/2 and 2."""
    gradients = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    assert direction(gradients, ratio={}) == pytest.approx([2.0, 2.0])
    assert direction(gradients, ratio={"b": 3.0}) == pytest.approx([1.0, 3.0])
    assert direction(gradients, ratio={"a": 100.0}) == pytest.approx([2.0, 1.5])


def test_ratio_control_follows_a_moving_average() -> None:
    """Lengths (1, 3), then (1, 13): the second average is .9 3 + .1 13 = 4, so s = (2, 5/8)."""
    isolation = Isolation(IsolationConfig(ratio={}), {"a": 1.0, "b": 1.0})
    isolation.coefficients(found(torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)), EVEN)
    again = Isolation(IsolationConfig(ratio={}), {"a": 1.0, "b": 1.0})
    again.load_state_dict(isolation.state_dict())
    chosen, metrics = again.coefficients(found(torch.tensor([[1.0, 0.0], [0.0, 13.0]], dtype=torch.float64)), EVEN)
    assert chosen.tolist() == pytest.approx([2.0, 0.625])
    assert float(metrics["grad/ratio/b"][0]) == pytest.approx(4 / 2.5)


def test_what_was_isolated_is_shown() -> None:
    isolation = Isolation(IsolationConfig(mode="project"), {"a": 1.0, "b": 1.0})
    _, metrics = isolation.coefficients(found(G), EVEN)
    assert [float(metrics[f"grad/isolated/{name}"][0]) for name in "ab"] == [1.0, 1.0]
    apart = torch.eye(2, dtype=torch.float64)
    _, metrics = isolation.coefficients(found(apart), EVEN)
    assert [float(metrics[f"grad/isolated/{name}"][0]) for name in "ab"] == [0.0, 0.0]


def test_a_constant_deadlock_is_warned_of() -> None:
    isolation = Isolation(IsolationConfig(mode="project"), {"a": 1.0, "b": 1.0})
    for step in range(WATCHED):
        assert isolation.warning == ""
        isolation.coefficients(found(G if step != 7 else torch.eye(2, dtype=torch.float64)), EVEN)
    assert "rewards a and b are opposed" in isolation.warning


def test_rewards_of_weight_0_are_left_out() -> None:
    isolation = Isolation(IsolationConfig(mode="project"), {"a": 1.0, "b": 0.0, "c": 2.0})
    assert isolation.names == ("a", "c")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mode": "split"}, "isolation.mode is 'split'"),
        ({"level": "logits"}, "isolation.level is 'logits'"),
        ({"threshold": 1.0}, "isolation.threshold is 1.0"),
        ({"ratio": {"a": 0.0}}, "not above 0"),
        ({"ratio": {"x": 1.0}}, "names x, no reward"),
    ],
)
def test_mistakes(config: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Isolation(IsolationConfig(**config), {"a": 1.0})  # type: ignore[arg-type]
