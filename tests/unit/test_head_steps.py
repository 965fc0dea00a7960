"""Heads step on the mean gradient of several steps of the trunk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from alignment.head_steps import HeadSteps


def walk(steps: HeadSteps, gradients: list[float], save_after: int | None = None) -> list[float | None]:
    """What the head would step on at each update."""
    p = nn.Parameter(torch.zeros(1))
    seen: list[float | None] = []
    for i, gradient in enumerate(gradients):
        p.grad = torch.tensor([float(gradient)])
        steps.take({"a": p})
        seen.append(None if p.grad is None else float(p.grad))
        if i + 1 == save_after:
            state = steps.state_dict()
            steps = HeadSteps(steps.every, steps.between)
            steps.load_state_dict(state)
    return seen


def test_mean_and_last_by_hand() -> None:
    assert walk(HeadSteps(3, "mean"), [1, 2, 6, 4, 4, 1]) == [None, None, 3.0, None, None, 3.0]
    assert walk(HeadSteps(3, "last"), [1, 2, 6, 4, 4, 1]) == [None, None, 6.0, None, None, 1.0]
    assert walk(HeadSteps(3, "rate"), [1, 2, 6]) == [1.0, 2.0, 6.0]
    assert walk(HeadSteps(1, "mean"), [1, 2]) == [1.0, 2.0]
    assert (HeadSteps(3, "rate").rate, HeadSteps(3, "mean").rate) == (1 / 3, 1.0)


@pytest.mark.parametrize("between", ["mean", "last", "rate"])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_what_is_saved_goes_on(between: str, after: int) -> None:
    gradients = [1.0, 2.0, 6.0, 4.0, 4.0, 1.0]
    whole = walk(HeadSteps(3, between), gradients)  # type: ignore[arg-type]
    assert walk(HeadSteps(3, between), gradients, save_after=after) == whole  # type: ignore[arg-type]


@pytest.mark.parametrize(("between", "head"), [("mean", -0.2), ("last", -0.2), ("rate", -0.2)])
def test_six_steps_of_sgd(between: str, head: float) -> None:
    """G-FREQ of ALGORITHMS section 8: rate 0.1, gradient 1, six steps: trunk -0.6, head -0.2."""
    steps = HeadSteps(3, between)  # type: ignore[arg-type]
    trunk, sub = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [trunk]}, {"params": [sub], "lr": 0.1 * steps.rate}], lr=0.1)
    for _ in range(6):
        trunk.grad, sub.grad = torch.ones(1), torch.ones(1)
        steps.take({"a": sub})
        optimizer.step()
    assert trunk.item() == pytest.approx(-0.6)
    assert sub.item() == pytest.approx(head)


def test_a_frozen_head_gives_nothing() -> None:
    """A gradient that is missing is not zero: the moments of a head that waits stay as they are."""
    steps, p = HeadSteps(2, "mean"), nn.Parameter(torch.zeros(1))
    for _ in range(2):
        steps.take({"a": p})
        assert p.grad is None
