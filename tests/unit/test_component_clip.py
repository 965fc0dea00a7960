"""Clipping of each component: [G-CLIP] of ALGORITHMS by hand, over micro-batches, at parameters and at states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alignment.batches import GroupBatch
from alignment.component_clip import (
    ComponentClipConfig,
    Components,
    clip_coefficients,
    update_at_parameters,
    update_at_states,
)
from alignment.errors import UserError
from alignment.optim import OptimConfig
from alignment.training import TrainingMixin
from alignment.update import Counts
from tests.unit.test_update import SGD, Recorder, batch, fit

G1, G2 = (3.0, 4.0), (0.6, -0.8)
L1, L2 = 0.65, 0.3
ANY: dict[str, Any] = {"ratio": math.inf}
"""No bound at all."""


class Two(TrainingMixin):
    """Component i is L_i + g_i (w - 1): a token means x of that. The hidden state of a token is w itself."""

    def __init__(
        self,
        names: Sequence[str] = ("a", "b"),
        losses: tuple[float, float] = (L1, L2),
        optim: OptimConfig = SGD,
        micro_batch_tokens: int | None = 1,
        **clip: Any,
    ) -> None:
        super().__init__(optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.weight = nn.Parameter(torch.ones(2))
        self.names, self.losses, self.clip = names, losses, ComponentClipConfig(**clip)
        self.history: list[dict[str, float]] = []
        self.left: list[Any] = []

    def components(self, micro: GroupBatch, counts: Counts, states: Tensor | None = None) -> Components:
        states = self.states(micro) if states is None else states
        x = micro.tokens["x"] / counts.tokens
        shares = {
            name: ((states - 1) @ torch.tensor(g) * x).sum() + loss * x.sum()
            for name, g, loss in zip("ab", (G1, G2), self.losses, strict=True)
        }
        values = {name: share.detach().double() for name, share in shares.items()}
        return Components(shares=shares, values=values, metrics={})

    def states(self, micro: GroupBatch) -> Tensor:
        return self.weight.expand(len(micro.completion_ids), 2)

    def train_batch(self, batch: GroupBatch) -> None:
        counts = Counts.of(batch)
        if self.clip.at == "parameters":
            update_at_parameters(self, batch, self.components, self.names, self.clip, counts)
        else:
            update_at_states(self, batch, self.components, self.states, self.names, self.clip, counts)

    def note_values(self, values: Mapping[str, float]) -> None:
        self.history.append(dict(values))
        super().note_values(values)

    def told(self, name: str) -> list[float]:
        return [values[name] for values in self.history if name in values]


def moved(module: Two) -> list[float]:
    return (1 - module.weight.detach()).tolist()


def test_golden_coefficients() -> None:
    """[G-CLIP]: n = (5, 1), tau = (1.3, .6)."""
    found = clip_coefficients(torch.tensor([5.0, 1.0]), torch.tensor([L1, L2]), ComponentClipConfig())
    assert found.tolist() == pytest.approx([0.26, 0.6], abs=1e-6)


@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 4])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("sign", [1, -1])
def test_golden_step(sign: int, names: tuple[str, str], micro_batch_tokens: int | None, tmp_path: Path) -> None:
    """[G-CLIP]: (1.14, .56), whatever the order, the micro-batches and the sign of a component's value: a negative one
    is not turned round (the brief's form ascends)."""
    module = Two(names, (L1, sign * L2), micro_batch_tokens=micro_batch_tokens)
    fit(module, [batch([1.0], [2.0, 0.0, 1.0])], tmp_path)
    assert moved(module) == pytest.approx([1.14, 0.56], abs=1e-5)
    assert [module.told(f"grad_norm/{n}")[0] for n in "ab"] == pytest.approx([5, 1])
    assert [module.told(f"grad/clip_coef/{n}")[0] for n in "ab"] == pytest.approx([0.26, 0.6], abs=1e-6)
    assert module.told("loss")[0] == pytest.approx(L1 + sign * L2, abs=1e-6)  # of the objective, not what is left of it


@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 4])
def test_golden_step_at_states(micro_batch_tokens: int | None, tmp_path: Path) -> None:
    """The gradient at a token's state is g x / 4: n is |g| sqrt(1 + 4 + 0 + 1) / 4. Pulled back, each is g again."""
    module = Two(micro_batch_tokens=micro_batch_tokens, at="states")
    fit(module, [batch([1.0], [2.0, 0.0, 1.0])], tmp_path)
    norms = [size * math.sqrt(6) / 4 for size in (5, 1)]
    a, b = 1.3 / norms[0], 0.6 / norms[1]
    assert [module.told(f"grad_norm/states/{n}")[0] for n in "ab"] == pytest.approx(norms)
    assert [module.told(f"grad/clip_coef/{n}")[0] for n in "ab"] == pytest.approx([a, b], abs=1e-5)
    assert moved(module) == pytest.approx([3 * a + 0.6 * b, 4 * a - 0.8 * b], abs=1e-5)
    assert module.told("loss")[0] == pytest.approx(L1 + L2, abs=1e-6)


@pytest.mark.parametrize("at", ["parameters", "states"])
def test_a_component_near_zero_keeps_a_gradient(at: Any, tmp_path: Path) -> None:
    """Of value 0 the bound is `least`: a contribution of that length, along g2."""
    module = Two(losses=(0.0, 0.0), at=at, least=0.05)
    fit(module, [batch([1.0])], tmp_path)
    a, b = 0.05 / 5, 0.05
    assert moved(module) == pytest.approx([3 * a + 0.6 * b, 4 * a - 0.8 * b], abs=1e-5)


class Plain(Two):
    """The same components through the plain update."""

    def train_batch(self, batch: GroupBatch) -> None:
        self.update(batch, lambda micro, counts: (sum(self.components(micro, counts).shares.values()), {}))


@pytest.mark.parametrize("at", ["parameters", "states"])
def test_without_a_bound_it_is_the_plain_update(at: Any, tmp_path: Path) -> None:
    """Weights, moments, the usual clip and the schedule over four steps; nothing is left in `.grad`."""
    optim = OptimConfig(lr=0.1, schedule="linear", clip_norm=0.5)
    runs = []
    for kind in (Two, Plain):
        module, recorder = kind(optim=optim, at=at, **ANY), Recorder()
        fit(module, [batch([x], [1.0, 0.0]) for x in (1.0, 3.0, -2.0, 0.5)], tmp_path, callbacks=[recorder])
        runs.append((module, recorder))
    (ours, a), (plain, b) = runs
    torch.testing.assert_close(ours.weight, plain.weight)
    for name, moment in a.moments[-1].items():
        torch.testing.assert_close(moment, b.moments[-1][name])
    assert ours.told("loss") == pytest.approx(plain.told("loss"), rel=1e-6)
    assert ours.told("grad_norm") == pytest.approx(plain.told("grad_norm"), rel=1e-6)
    assert ours.told("lr") == plain.told("lr")


class Watched(Two):
    """Looks at `.grad` before each component's backward."""

    def components(self, micro: GroupBatch, counts: Counts, states: Tensor | None = None) -> Components:
        self.left.append(self.weight.grad)
        return super().components(micro, counts, states)


def test_nothing_of_a_component_is_left_behind(tmp_path: Path) -> None:
    module = Watched()
    fit(module, [batch([1.0], [2.0]), batch([1.0], [3.0])], tmp_path)
    assert module.left == [None] * 4


@pytest.mark.parametrize("at", ["parameters", "states"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_component_skips_the_step(bad: float, at: Any, tmp_path: Path) -> None:
    """C18: no component is quietly left out."""
    module, recorder = Two(optim=OptimConfig(lr=0.1), at=at), Recorder()
    fit(module, [batch([x]) for x in (1.0, bad, 2.0)], tmp_path, callbacks=[recorder])
    assert recorder.global_step == [1, 1, 2]
    assert module.nonfinite_steps == 1
    for name, moment in recorder.moments[0].items():
        assert torch.equal(recorder.moments[1][name], moment), name


@pytest.mark.parametrize("at", ["parameters", "states"])
def test_an_empty_batch_is_a_step_of_nothing(at: Any, tmp_path: Path) -> None:
    module = Two(at=at)
    fit(module, [batch([1.0]).select_groups([])], tmp_path)
    assert module.weight.tolist() == [1, 1]
    assert module.told("loss") == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0.0}, "component_clip.ratio is 0.0; it must be positive"),
        ({"least": -1.0}, "component_clip.least is -1.0; it must be positive"),
        ({"at": "logits"}, "component_clip.at is 'logits'; it is one of parameters, states"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ComponentClipConfig(**settings)
