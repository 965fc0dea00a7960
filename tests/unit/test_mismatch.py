"""Engines that are not the trainer: weights and metrics worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.mismatch import importance_weights, mismatch_metrics


def rollout_batch() -> tuple[GroupBatch, torch.Tensor]:
    """Two completions; the trainer's log-probs exceed the sampler's by ln 1.5, ln 4, -ln 2, and a NaN unscored."""
    group = Group(prompt=[1], completions=[[5, 6], [7, 8]], scored=[[True, True], [True, False]])
    batch = GroupBatch.from_groups([group]).with_tokens(sampler_logps=torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    gaps = torch.tensor([math.log(1.5), math.log(4.0), -math.log(2.0), math.nan])
    return batch, batch.tokens["sampler_logps"] + gaps


def test_token_weights_are_truncated_ratios():
    batch, trainer = rollout_batch()
    weights = importance_weights(batch, trainer.requires_grad_(), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.5, 2.0, 0.5, 1.0]))
    assert not weights.requires_grad


def test_sequence_weights_are_truncated_products():
    batch, trainer = rollout_batch()
    weights = importance_weights(batch, trainer, cap=8.0, level="sequence")
    torch.testing.assert_close(weights, torch.tensor([6.0, 6.0, 0.5, 1.0]))


def test_enormous_gaps_stay_finite():
    batch, trainer = rollout_batch()
    assert importance_weights(batch, trainer + 1000.0, cap=3.0).tolist() == pytest.approx([3.0, 3.0, 3.0, 1.0])
    assert all(torch.isfinite(s) for s, _ in mismatch_metrics(batch, trainer + 1000.0).values())


def test_metrics_by_hand():
    batch, trainer = rollout_batch()
    metrics = mismatch_metrics(batch, trainer, cap=2.0)
    means = {name: float(s / c) for name, (s, c) in metrics.items()}
    # e^d - 1 - d for d = ln 1.5, ln 4, -ln 2
    kl = (0.5 - math.log(1.5) + 3.0 - math.log(4.0) - 0.5 + math.log(2.0)) / 3
    gap = (math.log(1.5) + math.log(4.0) + math.log(2.0)) / 3
    assert means == pytest.approx({"sampler/kl": kl, "sampler/logp_gap": gap, "sampler/clipped": 1 / 3}, abs=1e-6)


def test_equal_engines_have_weight_one_and_no_divergence():
    batch, _ = rollout_batch()
    same = batch.tokens["sampler_logps"]
    assert importance_weights(batch, same).tolist() == [1.0] * 4
    assert all(float(s) == 0.0 for s, _ in mismatch_metrics(batch, same).values())


def test_a_cap_of_nothing_is_refused():
    batch, trainer = rollout_batch()
    with pytest.raises(ValueError, match="cap must be above 0"):
        importance_weights(batch, trainer, cap=0.0)
