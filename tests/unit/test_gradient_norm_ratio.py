"""GradientNormRatio: numbers by hand, what it steers, and real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.errors import UserError
from alignment.gradient_ratio import averaged, deviations, factors
from callbacks import GradientNormRatio
from modules import GRPO, MORL, SFT, DecoupledPO
from tests.callback_toys import Headed, Trained, ends
from tests.rl_toys import fit, here, online
from tests.toys import OPTIM, TINY, FixedData, groups
from tests.unit.test_decoupled_po import NAMES, REWARDS, decoupled, weights_of

TARGET = {"professional": 1.0, "sentiment": 1.2, "efficiency": 0.8}
SHARES = torch.tensor([1.0, 1.2, 0.8], dtype=torch.float64)


def test_formulas_by_hand() -> None:
    """n / rho = 1, 2, 1/2 of mean 7/6; sum n / sum rho = 3.8 / 3 = 19/15."""
    norms = torch.tensor([1.0, 2.4, 0.4], dtype=torch.float64)
    assert deviations(norms, SHARES).tolist() == pytest.approx([6 / 7, 12 / 7, 3 / 7])
    assert factors(norms, SHARES).tolist() == pytest.approx([19 / 15, 19 / 30, 2.0])  # the last would be 38/15
    assert factors(SHARES * 7, SHARES).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert factors(norms * torch.tensor([0.0, 1, 1]), SHARES)[0] == 1.0
    assert deviations(torch.zeros(3, dtype=torch.float64), SHARES).tolist() == [0.0, 0.0, 0.0]
    assert averaged(None, 3.0) == 3.0
    assert averaged(3.0, 13.0) == pytest.approx(4.0)


def feed(callback: GradientNormRatio, module: Any, run: Any, *norms: float) -> dict[str, float]:
    names = [f"head/{name}" for name in module.weights]
    callback.on_gradients(run, module, {"total": 1.0, **dict(zip(names, norms, strict=False))})
    return {name: value for row in module.noted for name, value in row.items()}


def test_an_excursion_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    module, run, callback = Headed(*TARGET), Trained(), GradientNormRatio(TARGET)
    found = feed(callback, module, run, 1.0, 2.4, 0.4)
    assert found == pytest.approx(
        {"grad/dev/head/professional": 6 / 7, "grad/dev/head/sentiment": 12 / 7, "grad/dev/head/efficiency": 3 / 7}
    )
    assert run.events == ["gradient_ratio"] * 2
    assert "the gradient of head/sentiment is 1.71 times what its share would make it" in caplog.text
    # averages .9 old + .1 new: 1.1, 2.4, 0.4 -> 1.1, 2, 1/2 of mean 1.2
    found = feed(callback, module, run, 2.0, 2.4, 0.4)
    assert found["grad/dev/head/professional"] == pytest.approx(1.1 / 1.2)
    assert found["grad/dev/head/sentiment"] == pytest.approx(2 / 1.2)
    assert len(run.events) == 2


def test_it_is_told_again_after_it_came_back() -> None:
    module, run, callback = Headed(*TARGET), Trained(), GradientNormRatio(TARGET, ema=0.0)
    told = []
    for norms in [(1, 2.4, 0.4), (1, 2.5, 0.4), (1, 1.2, 0.8), (1, 2.4, 0.4)]:
        feed(callback, module, run, *norms)
        again = GradientNormRatio(TARGET, ema=0.0)  # as a resume would
        again.load_state_dict(callback.state_dict())
        callback = again
        told.append((len(run.events), sorted(callback.outside)))
    outside = ["head/efficiency", "head/sentiment"]
    assert told == [(2, outside), (2, outside), (2, []), (4, outside)]


def test_it_waits_until_every_norm_is_known() -> None:
    """In a cold start each batch has the gradient of one head."""
    module, run, callback = Headed("a", "b"), Trained(), GradientNormRatio()
    assert feed(callback, module, run, 1.0) == {}
    callback.on_gradients(run, module, {"head/b": 3.0})
    assert module.noted == [pytest.approx({"grad/dev/head/a": 0.5, "grad/dev/head/b": 1.5})]
    callback.on_gradients(run, module, {"total": 0.0})
    assert len(module.noted) == 1


def test_control_of_heads_by_hand() -> None:
    """Lengths 1 and 3: s = 2 and 2/3."""
    module, run, callback = Headed("a", "b"), Trained(), GradientNormRatio(control=True)
    feed(callback, module, run, 1.0, 3.0)
    assert module.scaled == [("a", pytest.approx(2.0)), ("b", pytest.approx(2 / 3))]
    assert module.noted[-1] == pytest.approx({"grad/factor/head/a": 2.0, "grad/factor/head/b": 2 / 3})


def test_what_control_does_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Lengths 1, 3: factors 2, 2/3. 1, 1.1: 1.05, 0.955, so both came back. 1, 1.3: 1.15, 0.885, less than a quarter.
    3, 1: 2/3, 2."""
    module, run, callback, told = Headed("a", "b"), Trained(), GradientNormRatio(ema=0.0, control=True), []
    for norms in [(1.0, 3.0), (1.0, 1.1), (1.0, 1.3), (3.0, 1.0)]:
        feed(callback, module, run, *norms)
        told.append(run.events.count("gradient_control"))
        again = GradientNormRatio(ema=0.0, control=True)  # as a resume would
        again.load_state_dict(callback.state_dict())
        callback = again
    assert told == [2, 4, 4, 6]
    assert "the learning rate of head/a is multiplied by 2 from now on, before by 1" in caplog.text
    assert "the learning rate of head/b is multiplied by 2 from now on, before by 0.955" in caplog.text


def test_a_head_whose_reward_is_flat_is_left_alone() -> None:
    """It has never had a signal: the others do not wait for it. Lengths 1 and 3: factors 2 and 2/3, as without it."""
    module, run, callback = Headed("a", "b", "c"), Trained(), GradientNormRatio(control=True)
    module.flat["c"] = 1.0
    found = feed(callback, module, run, 1.0, 3.0, 1e-5)
    assert module.scaled == [("a", pytest.approx(2.0)), ("b", pytest.approx(2 / 3)), ("c", 1.0)]
    assert "grad/dev/head/c" not in found
    assert found["grad/dev/head/a"] == pytest.approx(0.5)


def test_a_flat_batch_is_no_measurement() -> None:
    """Lengths 1, 1 and 4, mean 2: factors 2, 2, 1/2. A batch in which c is flat, and then again: 1 for c meanwhile, and
    nothing to tell, for its average waits and so do the others' factors."""
    module, run, callback = Headed("a", "b", "c"), Trained(), GradientNormRatio(control=True)
    for flat, norm, factor in ((0.0, 4.0, 0.5), (1.0, 1e-5, 1.0), (0.5, 4.0, 0.5)):
        module.flat["c"] = flat
        feed(callback, module, run, 1.0, 1.0, norm)
        expected = {"a": pytest.approx(2.0), "b": pytest.approx(2.0), "c": pytest.approx(factor)}
        assert module.scaled[-3:] == list(expected.items())
        assert run.events == ["gradient_ratio"] * 3 + ["gradient_control"] * 3
        assert callback.averages["c"] == pytest.approx(4.0)
    module.flat = dict.fromkeys("abc", 1.0)
    feed(callback, module, run, 1.0, 1.0, 4.0)
    assert module.scaled[-3:] == [("a", 1.0), ("b", 1.0), ("c", 1.0)]


# ---------------------------------------------------------------------- runs


def test_heads_of_a_run(tmp_path: Path) -> None:
    """The logged deviations are those of the logged norms, and rates follow."""
    callback = GradientNormRatio({"low": 2.0}, control=True)
    module = decoupled()
    watch, run = fit(module, tmp_path, callbacks=[callback], max_steps=1)
    logged = watch.logged[0]
    relative = [logged[f"grad_norm/head/{name}"] / (2.0 if name == "low" else 1.0) for name in NAMES]
    for name, value in zip(NAMES, relative, strict=True):
        assert logged[f"grad/dev/head/{name}"] == pytest.approx(value * 3 / sum(relative), rel=1e-5)
    for k, name in enumerate(NAMES):
        rates = [group["lr"] for group in run.optimizers[0].param_groups if group["part"] == f"heads.subs.{k}."]
        assert rates == [pytest.approx(OPTIM.lr * logged[f"grad/factor/head/{name}"], rel=1e-5)]


@pytest.mark.parametrize("level", ["parameters", "states"])
def test_rewards_of_decoupled_po(level: str, tmp_path: Path) -> None:
    """Its control is that of isolation.ratio, one update later."""
    callback = GradientNormRatio({"low": 2.0}, control=True)
    module = decoupled(isolation={"mode": "project", "level": level})
    watch, _ = fit(module, tmp_path, callbacks=[callback], max_steps=1)
    ratio = decoupled(isolation={"mode": "project", "level": level, "ratio": {"low": 2.0}})
    other, _ = fit(ratio, tmp_path, max_steps=1)
    for name in NAMES:
        assert watch.logged[0][f"grad/dev/{name}"] == pytest.approx(other.logged[0][f"grad/ratio/{name}"], rel=1e-5)
    first = torch.tensor([callback.averages[name] for name in NAMES], dtype=torch.float64)
    expected = factors(first, torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)).tolist()
    assert [module.gradient_factors[name] for name in NAMES] == pytest.approx(expected)


def test_factors_reach_the_trunk(tmp_path: Path) -> None:
    """With factors 2 on every reward and no penalty the trunk's gradient doubles; heads keep theirs."""
    norms = []
    for factor in (1.0, 2.0):
        module = decoupled(isolation={"ratio": None, "mode": "block", "threshold": 0.99}, kl={"coefficient": 0.0})
        module.gradient_factors = dict.fromkeys(NAMES, factor)
        watch, _ = fit(module, tmp_path, max_steps=1)
        norms.append([watch.logged[0][f"grad_norm/{part}"] for part in ("trunk", "head/odd")])
    assert norms[1] == pytest.approx([2 * norms[0][0], norms[0][1]], rel=1e-4)


@pytest.mark.parametrize("combine", ["gradient_sum", "mgda"])
def test_rewards_of_morl(combine: str, tmp_path: Path) -> None:
    """A factor multiplies the gradient itself: MGDA of g_k s_k, so that a short gradient made longer counts for
    less."""
    callback = GradientNormRatio(control=True)
    module = online(MORL, rewards=REWARDS, combine=combine)
    watch, _ = fit(module, tmp_path, callbacks=[callback])
    first, second = watch.logged
    norms = torch.tensor([first[f"grad_norm/{name}"] for name in NAMES], dtype=torch.float64)
    expected = deviations(norms, torch.ones(3, dtype=torch.float64)).tolist()
    assert [first[f"grad/dev/{name}"] for name in NAMES] == pytest.approx(expected, rel=1e-5)
    if combine == "gradient_sum":
        for name in NAMES:
            assert second[f"grad/weight/{name}"] == pytest.approx(first[f"grad/factor/{name}"], rel=1e-5)


def test_parameter_groups_of_any_module(tmp_path: Path) -> None:
    callback = GradientNormRatio({"vectors": 0.1}, of="groups")
    module = SFT(policy=TINY, optim=OPTIM)
    watch, run = fit(module, tmp_path, FixedData(groups(8, 1)), callbacks=[callback], max_steps=1)
    assert set(callback.averages) == {group["name"] for group in run.optimizers[0].param_groups}
    total = sum(norm**2 for norm in callback.averages.values()) ** 0.5
    assert total == pytest.approx(float(watch.gradients[0].double().norm()), rel=1e-5)
    shares = {"matrices": 1.0, "vectors": 0.1}
    relative = {name: norm / shares[name] for name, norm in callback.averages.items()}
    for name, value in relative.items():
        assert watch.logged[0][f"grad/dev/{name}"] == pytest.approx(value * 2 / sum(relative.values()), rel=1e-5)


def test_watching_changes_nothing(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [GradientNormRatio(), GradientNormRatio(of="groups")]):
        module = decoupled()
        fit(module, tmp_path, callbacks=callbacks)
        found.append(weights_of(module))
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{}, {"isolation": {"mode": "project", "level": "states"}}])
def test_resume(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, part, resumed = ends(
        tmp_path, 4, lambda: decoupled(**settings), lambda: [GradientNormRatio({"low": 3.0}, control=True)], weights_of
    )
    assert resumed == whole != part


def test_a_run_that_goes_on_without_it_has_the_rates_it_was_given(tmp_path: Path) -> None:
    calls = iter([GradientNormRatio(control=True), GradientNormRatio(control=True), None])

    def callbacks() -> list[Any]:
        return [callback for callback in [next(calls)] if callback is not None]

    whole, _, resumed = ends(tmp_path, 2, decoupled, callbacks, lambda module: None)
    assert {rate for _, rate in whole[1]} != {OPTIM.lr}
    assert [rate for _, rate in resumed[1]] == pytest.approx([OPTIM.lr] * len(resumed[1]))


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": {"a": 0.0}}, "the target of a is 0"),
        ({"target": {"a": float("inf")}}, "a share is above 0"),
        ({"of": "layers"}, "of is 'layers'"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"of": "groups", "control": True}, "not for parameter groups"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        GradientNormRatio(**settings)


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (lambda: online(GRPO), {"of": "heads"}, "this GRPO has gradients of groups, none of heads"),
        (lambda: online(GRPO), {"control": True}, "GRPO has no gradients of rewards or heads"),
        (lambda: online(MORL, scalarise="chebyshev"), {"of": "rewards"}, "none of rewards"),
        (decoupled, {"of": "rewards"}, "this DecoupledPO has gradients of heads and groups, none of rewards"),
        (decoupled, {"target": {"tone": 1.0}}, "target names tone; of heads there are length, low, odd"),
        (decoupled, {"target": {"tone": 1.0}, "of": "groups"}, "target names tone; of groups there are"),
        (lambda: decoupled(isolation={"ratio": {"odd": 2.0}}), {"control": True}, "isolation.ratio controls"),
    ],
)
def test_wrong_modules(module: Any, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        fit(module(), tmp_path, callbacks=[GradientNormRatio(**settings)], max_steps=1)
    assert "\n" not in str(caught.value)


def test_two_that_would_control_the_same(tmp_path: Path) -> None:
    """of: null is of heads here. One that only watches may stand beside one that controls."""
    ones = [GradientNormRatio(control=True), GradientNormRatio(of="heads", control=True)]
    with pytest.raises(UserError, match=r"two callbacks\.GradientNormRatio would control the gradients of heads"):
        fit(decoupled(), tmp_path, callbacks=ones, max_steps=1)
    fit(decoupled(), tmp_path, callbacks=[GradientNormRatio(control=True), GradientNormRatio(of="groups")], max_steps=1)


def test_one_head_only_is_nothing_to_compare(tmp_path: Path) -> None:
    watch, _ = fit(online(DecoupledPO, rewards={"odd": here()}), tmp_path, callbacks=[GradientNormRatio()], max_steps=1)
    assert watch.logged[0]["grad/dev/head/odd"] == pytest.approx(1.0)
