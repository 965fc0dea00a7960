"""Updates from the gradients of several objectives: by hand, against the plain update, and what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from alignment.batches import GroupBatch
from alignment.combine import Combiner
from alignment.components import (
    REST,
    GradientStore,
    Objectives,
    check_reached,
    gram_of,
    update_objectives,
    weighted_sum,
)
from alignment.metrics import Metrics
from alignment.optim import OptimConfig
from alignment.randomness import generator
from alignment.training import TrainingMixin
from alignment.update import Counts
from tests.unit.test_update import SGD, Recorder, batch, fit

NAMES = ("a", "b")


class Two(TrainingMixin):
    """Objective a is x w_0 and objective b is x (w_1 - w_0 / 2), token means over the batch; the rest is 3 v.

    At x = 1 the gradients of w are (1, 0) and (-1/2, 1), those of [G-GRAD].
    """

    def __init__(
        self,
        method: str = "gradient_sum",
        weights: tuple[float, float] = (1.0, 1.0),
        optim: OptimConfig = SGD,
        micro_batch_tokens: int | None = 1,
        **settings: Any,
    ) -> None:
        super().__init__(optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.weight, self.own = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        self.combiner, self.weights = Combiner(method, settings, NAMES), torch.tensor(weights)
        self.asked: list[Objectives] = []
        self.history: list[dict[str, float]] = []

    def parts(self, micro: GroupBatch, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
        x = micro.tokens["x"].sum() / counts.tokens
        own = 3 * self.own.sum() * len(micro.completion_ids) / counts.tokens
        return {"a": self.weight[0] * x, "b": (self.weight[1] - self.weight[0] / 2) * x, REST: own}, {}

    def combine(self, found: Objectives) -> Tensor:
        self.asked.append(found)
        return self.combiner(found.gram, self.weights, generator(0, "combine"))

    def train_batch(self, batch: GroupBatch) -> None:
        update_objectives(self, batch, self.parts, NAMES, self.combine)

    def note_update(self, *, loss: float, grad_norm: float, lr: float, metrics: Metrics) -> None:
        means = {name: float(total / count) for name, (total, count) in metrics.items()}
        self.history.append({**means, "loss": loss, "total": grad_norm})
        super().note_update(loss=loss, grad_norm=grad_norm, lr=lr, metrics=metrics)


class Listener(L.Callback):
    def __init__(self) -> None:
        self.norms: list[Mapping[str, float]] = []

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Mapping[str, float]) -> None:
        self.norms.append(norms)


@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 4])
@pytest.mark.parametrize(
    ("method", "expected"),
    [("gradient_sum", [0.5, 1.0]), ("pcgrad", [0.8, 1.4]), ("mgda", [0.307692, 0.461538]), ("nash", None)],
)
def test_steps_by_hand(
    method: str, expected: list[float] | None, micro_batch_tokens: int | None, tmp_path: Path
) -> None:
    """Micro-batches of one and of three tokens make gradients of the whole batch before anything is combined."""
    listener = Listener()
    module = Two(method, micro_batch_tokens=micro_batch_tokens)
    fit(module, [batch([1.0], [2.0, 0.0, 1.0])], tmp_path, callbacks=[listener])
    if expected is None:
        expected = [0.743496 / math.sqrt(2), 1.203002 / math.sqrt(2)]
    step = (1 - module.weight.detach()).tolist()
    assert step == pytest.approx(expected, abs=1e-6)
    assert float(module.own.detach()) == pytest.approx(1 - 3)
    (now,) = module.history
    assert (now["grad_norm/a"], now["grad_norm/b"]) == pytest.approx((1, math.sqrt(1.25)))
    assert now["grad/cos/a/b"] == pytest.approx(-0.5 / math.sqrt(1.25))
    assert (now["loss/a"], now["loss/b"]) == pytest.approx((1, 0.5))
    # The logged loss is the one whose gradient was taken: coefficients times losses, and the rest.
    assert now["loss"] == pytest.approx(now["grad/weight/a"] + now["grad/weight/b"] / 2 + 3)
    assert now["total"] == pytest.approx(math.hypot(*expected, 3))
    assert listener.norms[0] == pytest.approx({"a": 1, "b": math.sqrt(1.25), "total": now["total"]})


class Plain(Two):
    """The same objectives through the plain update."""

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        parts, metrics = self.parts(micro, counts)
        a, b = self.weights.tolist()
        return a * parts["a"] + b * parts["b"] + parts[REST], metrics

    def train_batch(self, batch: GroupBatch) -> None:
        self.update(batch, self.loss)


def test_the_weighted_sum_is_the_plain_update(tmp_path: Path) -> None:
    """Weights, moments, clipping and schedule over four steps."""
    optim = OptimConfig(lr=0.1, schedule="linear", clip_norm=0.5)
    runs = []
    for kind in (Two, Plain):
        module, recorder = kind(weights=(2.0, 0.5), optim=optim), Recorder()
        fit(module, [batch([x], [1.0, 0.0]) for x in (1.0, 3.0, -2.0, 0.5)], tmp_path, callbacks=[recorder])
        runs.append((module, recorder))
    (ours, a), (plain, b) = runs
    torch.testing.assert_close(ours.weight, plain.weight)
    for name, moment in a.moments[-1].items():
        torch.testing.assert_close(moment, b.moments[-1][name])
    for name in ("loss", "total"):
        assert [h[name] for h in ours.history] == pytest.approx([h[name] for h in plain.history], rel=1e-6)
    assert a.global_step == b.global_step


def test_a_nonfinite_objective_skips_the_step(tmp_path: Path) -> None:
    """C18; nobody is asked to combine what is not finite, so nothing is remembered of it."""
    module, recorder = Two("gradvac", optim=OptimConfig(lr=0.1)), Recorder()
    fit(module, [batch([x]) for x in (1.0, math.nan, 2.0)], tmp_path, callbacks=[recorder])
    assert recorder.global_step == [1, 1, 2]
    assert module.nonfinite_steps == 1
    assert len(module.asked) == 2
    assert math.isfinite(float(module.combiner.memory.sum()))
    for name, moment in recorder.moments[0].items():
        assert torch.equal(recorder.moments[1][name], moment), name
    assert math.isnan(module.history[1]["loss"])


def test_an_empty_batch_is_a_step_of_nothing(tmp_path: Path) -> None:
    module = Two("mgda")
    fit(module, [batch([1.0]).select_groups([])], tmp_path)
    assert module.weight.tolist() == [1, 1]
    assert module.history[0]["loss"] == 0


# ---------------------------------------------------------------------- what goes wrong


class Detached(Two):
    def parts(self, micro: GroupBatch, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
        parts, metrics = super().parts(micro, counts)
        return {**parts, "b": parts["b"].detach()}, metrics


def test_an_objective_without_gradient_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no gradient"):
        fit(Detached(), [batch([1.0])], tmp_path)


class Forgets(torch.autograd.Function):
    """Depends on both inputs and gives the second none."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return grad, None


class Lossy(Two):
    def parts(self, micro: GroupBatch, counts: Counts) -> tuple[dict[str, Tensor], Metrics]:
        parts, metrics = super().parts(micro, counts)
        return {**parts, "b": Forgets.apply(self.weight.sum(), self.own.sum())}, metrics


def test_a_gradient_that_went_missing_is_an_error(tmp_path: Path) -> None:
    """Objective a does not depend on `own`, which is no error; b does."""
    with pytest.raises(ValueError, match=r"'b' depends on 1 parameters that got no gradient .* of shape \(1,\)"):
        fit(Lossy(), [batch([1.0])], tmp_path)


def test_an_objective_that_reaches_nothing_is_an_error() -> None:
    outside = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="the backward pass of 'a' gave no parameter a gradient"):
        check_reached("a", outside.sum(), GradientStore([nn.Parameter(torch.ones(1))]))


# ---------------------------------------------------------------------- parts


def test_gram_matrix_over_parameters_of_which_some_are_missing() -> None:
    a = [torch.tensor([1.0, 2.0]), None, torch.tensor([[3.0]])]
    b = [torch.tensor([1.0, -1.0]), torch.tensor([7.0]), None]
    assert gram_of([a, b]).tolist() == [[14, -1], [-1, 51]]
    assert gram_of([[None], [None]]).tolist() == [[0, 0], [0, 0]]


def test_gram_matrix_keeps_small_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 1e8 + 1 is 1e8; in chunks of three the sum is the same."""
    a, b = [torch.tensor([1e4, 1.0, 0.0, 1.0])], [torch.tensor([1e4, 1.0, 5.0, -1.0])]
    for chunk in (1 << 20, 3):
        monkeypatch.setattr("alignment.components._CHUNK", chunk)
        assert gram_of([a, b]).tolist() == [[1e8 + 2, 1e8], [1e8, 1e8 + 27]]


def test_weighted_sums_take_none_for_zero() -> None:
    pair = [torch.tensor([1.0]), None, torch.tensor([10.0])]
    assert weighted_sum(pair, [2.0, 3.0, 0.5]).tolist() == [7]  # type: ignore[union-attr]
    assert weighted_sum([None, None], [1.0, 1.0]) is None
