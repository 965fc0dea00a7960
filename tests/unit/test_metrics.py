"""Metric windows: C19 and the arithmetic of C20 in one process (two processes: tests/distributed/test_ddp.py)."""

from __future__ import annotations

import math

import pytest
import torch

from alignment.losses import weighted
from alignment.metrics import MaskedMean, MetricWindow, add_metrics, mean_of


def window(*values: float, name: str = "loss") -> dict[str, float]:
    w = MetricWindow()
    for value in values:
        w.update({name: (torch.tensor(value), torch.tensor(1.0))})
    return w.flush()


def test_nonfinite_steps_are_left_out_and_counted() -> None:
    """C19."""
    assert window(0.5, math.nan, 0.7) == pytest.approx({"loss": 0.6, "nonfinite/loss": 1})


def test_only_nonfinite_steps_log_nan() -> None:
    """C19: NaN, not 0."""
    out = window(math.nan, math.inf)
    assert math.isnan(out["loss"])
    assert out["nonfinite/loss"] == 2


def test_counts_weigh_steps() -> None:
    """3 values of mean 1 and 1 value of 5: (3 + 5) / 4, not (1 + 5) / 2."""
    w = MetricWindow()
    w.update({"x": mean_of(torch.ones(3))})
    w.update({"x": mean_of(torch.tensor([5.0]))})
    assert w.flush() == {"x": 2.0}
    assert w.flush() == {}


def test_a_window_cut_by_a_checkpoint_is_logged_whole() -> None:
    """Steps 1, NaN | 2, 6: the mean over three finite steps is 3, one step was not finite."""
    before, after = MetricWindow(), MetricWindow()
    for value in (1.0, math.nan):
        before.update({"x": mean_of(torch.tensor([value]))})
    after.load_state_dict(before.state_dict())
    for value in (2.0, 6.0):
        after.update({"x": mean_of(torch.tensor([value]))})
    assert after.flush() == {"x": 3.0, "nonfinite/x": 1.0}
    assert before.flush() == {"x": 1.0, "nonfinite/x": 1.0}  # saving takes nothing away


def test_micro_batches_add_up() -> None:
    total: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    add_metrics(total, {"x": mean_of(torch.tensor([1.0, 2.0]))})
    add_metrics(total, {"x": mean_of(torch.tensor([6.0])), "y": mean_of(torch.tensor([1.0]))})
    assert [float(v) for v in total["x"]] == [9.0, 3.0]
    assert [float(v) for v in total["y"]] == [1.0, 1.0]


def test_nan_behind_the_mask_stays_there() -> None:
    values, mask = torch.tensor([1.0, math.nan]), torch.tensor([True, False])
    assert [float(v) for v in mean_of(values, mask)] == [1.0, 1.0]
    assert [float(v) for v in weighted(values, mask.float())] == [1.0, 1.0]


def test_weighted_mean() -> None:
    total, weight = weighted(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 0.5]))
    assert (float(total), float(weight)) == (5.5, 3.5)


def test_masked_mean() -> None:
    metric = MaskedMean()
    assert math.isnan(float(metric.compute()))
    metric.update(torch.tensor([1.0, 9.0]), torch.tensor([True, False]))
    metric.update(torch.tensor([[2.0, 3.0]]))
    assert float(metric.compute()) == pytest.approx(2.0)
    metric.reset()
    assert float(metric.count) == 0
