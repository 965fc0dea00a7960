"""Controllers against [G-CTRL] and by hand; their state goes through a checkpoint."""

from __future__ import annotations

import math

import pytest

from alignment.controllers import AdaptiveEntropy, AdaptiveKL, FixedKL
from alignment.errors import UserError


@pytest.mark.parametrize(("kl", "expected"), [(9.0, 0.200256), (6.6, 0.200128), (0.0, 0.199744)])
def test_golden_steps(kl: float, expected: float) -> None:
    controller = AdaptiveKL()
    controller.update(kl, 64)
    assert controller.coefficient == pytest.approx(expected, abs=1e-9)


def test_golden_hundred_saturated_steps() -> None:
    controller = AdaptiveKL()
    for _ in range(100):
        controller.update(100.0, 64)
    assert controller.coefficient == pytest.approx(0.227292, abs=1e-6)


def test_a_batch_of_more_completions_than_the_horizon() -> None:
    """No KL at all is 20 % too little at most: 0.2 * 0.8, then 0.16 * 0.8; far too much 0.128 * 1.2."""
    controller = AdaptiveKL(horizon=100)
    seen = []
    for kl in (0.0, 0.0, 100.0):
        controller.update(kl, 1024)
        seen.append(controller.coefficient)
    assert seen == pytest.approx([0.16, 0.128, 0.1536], abs=1e-12)


def test_smoothing_the_measured_kl() -> None:
    """9, then 3: with half of the old kept the controller sees 9 and 6, and 6 is the target."""
    controller = AdaptiveKL(ema=0.5)
    controller.update(9.0, 64)
    before = controller.coefficient
    controller.update(3.0, 64)
    assert controller.smoothed == 6.0
    assert controller.coefficient == before


@pytest.mark.parametrize(("kl", "end"), [(0.0, 1e-8), (1e9, 1e8)])
def test_a_target_out_of_reach_ends_at_a_bound(kl: float, end: float) -> None:
    """200 times 0.8 or 1.2 from 1: past 1e-8 and 1e8, and far from 0 and infinity."""
    controller = AdaptiveKL(coefficient=1.0, horizon=1)
    for _ in range(200):
        controller.update(kl, 1)
    assert controller.coefficient == end


def test_a_measurement_that_is_not_finite_is_ignored() -> None:
    kl, entropy = AdaptiveKL(), AdaptiveEntropy(target=1.0, value=0.1)
    for bad in (math.nan, math.inf):
        kl.update(bad, 64)
        entropy.update(bad)
    assert (kl.coefficient, entropy.value, entropy.coefficient) == (0.2, 0.1, 0.0)


def test_fixed() -> None:
    controller = FixedKL(coefficient=0.05)
    controller.update(1e6, 64)
    assert controller.coefficient == 0.05


def test_adaptive_entropy() -> None:
    controller = AdaptiveEntropy(target=0.5)
    seen = []
    for entropy in (0.4, 0.5, 0.6, 0.4):
        controller.update(entropy)
        seen.append((controller.value, controller.coefficient))
    assert seen == [
        (pytest.approx(0.005), pytest.approx(0.005)),
        (pytest.approx(0.010), pytest.approx(0.010)),
        (pytest.approx(0.005), 0.0),  # above its target the bonus rests
        (pytest.approx(0.010), pytest.approx(0.010)),
    ]


def test_adaptive_entropy_stays_between_nothing_and_its_bound() -> None:
    controller = AdaptiveEntropy(target=0.5, step=0.3)
    for _ in range(5):
        controller.update(0.1)
    assert controller.coefficient == 1.0
    for _ in range(5):
        controller.update(0.9)
    assert controller.value == 0.0


def test_resumed_equals_uninterrupted() -> None:
    straight, first, second = (AdaptiveKL(ema=0.9) for _ in range(3))
    entropy, entropy_first, entropy_second = (AdaptiveEntropy(target=0.5) for _ in range(3))
    for step in range(6):
        if step == 3:
            second.load_state_dict(first.state_dict())
            entropy_second.load_state_dict(entropy_first.state_dict())
        for kl in (straight, first if step < 3 else second):
            kl.update(float(step), 32)
        for bonus in (entropy, entropy_first if step < 3 else entropy_second):
            bonus.update(0.3 + 0.05 * step)
    assert second == straight
    assert entropy_second == entropy
    fixed = FixedKL(coefficient=0.1)
    fixed.load_state_dict(FixedKL(coefficient=0.3).state_dict())
    assert fixed.coefficient == 0.3


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(UserError, match=r"got 0\.2, 0 and 10000"):
        AdaptiveKL(target=0)
    with pytest.raises(UserError, match="ema is 1"):
        AdaptiveKL(ema=1)
    with pytest.raises(UserError, match="KL coefficient is -1"):
        FixedKL(coefficient=-1)
    with pytest.raises(UserError, match="target and step above 0"):
        AdaptiveEntropy(target=0)
