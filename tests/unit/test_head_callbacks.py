"""StalledHead, FusionStability and FocusReward: sequences by hand, and real runs."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.guard import roll_back
from callbacks import Checkpoint, FocusReward, FusionStability, GradientNormRatio, RegressionGuard, StalledHead
from modules import GRPO, SFT, DecoupledPO
from tests.callback_toys import Headed, Trained, ends
from tests.rl_toys import fit, here, online
from tests.toys import OPTIM, TINY, FixedData, groups
from tests.unit.test_decoupled_po import NAMES, REWARDS, Weights, decoupled, weights_of

FREE: dict[str, Any] = {"kl": {"coefficient": 0.0}, "heads": {"kl": 0.0}}
"""Nothing but its reward reaches a head."""


def same(completion: str) -> float:
    """A reward without a signal."""
    return 0.3


def dead(**settings: Any) -> Any:
    return decoupled(rewards=REWARDS | {"low": here(same)}, **(FREE | settings))


# ---------------------------------------------------------------------- StalledHead


def stall(callback: StalledHead, module: Any, run: Any, *norms: float) -> None:
    for norm in norms:
        callback.on_gradients(run, module, {"head/a": norm, "head/b": 1.0})
        module.head_steps.take({})


def test_rates_by_hand() -> None:
    """1.1, 1.21, 1.331, 1.4641, 1.61051, 1.771561, 1.9487171, then the cap; at the cap told once more."""
    module, run, callback = Headed("a", "b"), Trained(), StalledHead(steps=2)
    stall(callback, module, run, *[0.0] * 24)
    expected = [*(1.1**n for n in range(1, 8)), 2.0, 2.0]
    assert module.scaled == [("a", pytest.approx(factor)) for factor in expected]
    assert run.events == ["stalled_head"] * 9


def test_a_resume_goes_on_from_the_factor_in_force() -> None:
    """The registry holds it, the callback no other: 1.1, then by a new callback 1.21."""
    module, run = Headed("a", "b"), Trained()
    first, again = StalledHead(steps=1), StalledHead(steps=1)
    stall(first, module, run, 0.0)
    again.load_state_dict(first.state_dict())
    stall(again, module, run, 0.0)
    assert module.scaled == [("a", pytest.approx(1.1)), ("a", pytest.approx(1.21))]
    module.schedulables["optim.lr/a"].unscale("stalled")
    stall(again, module, run, 0.0)
    assert module.scaled[-1] == ("a", pytest.approx(1.1))


def test_a_step_of_the_heads_is_of_several_updates() -> None:
    """Of three: one norm above the threshold anywhere in them ends the row."""
    module, run, callback = Headed("a", "b", every=3), Trained(), StalledHead(steps=2)
    stall(callback, module, run, 0, 0, 0, 0, 2e-8, 0, 0, 0, 0, 0, 0)
    again = StalledHead(steps=2)
    again.load_state_dict(callback.state_dict())
    assert module.scaled == []
    stall(again, module, run, 0.9e-8)
    assert module.scaled == [("a", pytest.approx(1.1))]


def test_what_a_step_has_seen_so_far_is_kept() -> None:
    """A resume between the three updates of a step, the first of which had a gradient."""
    module, run, callback = Headed("a", "b", every=3), Trained(), StalledHead(steps=1)
    stall(callback, module, run, 1.0)
    again = StalledHead(steps=1)
    again.load_state_dict(callback.state_dict())
    stall(again, module, run, 0, 0)
    assert module.scaled == []


def test_a_frozen_head_and_one_without_a_gradient_do_not_count() -> None:
    module, run, callback = Headed("a", "b"), Trained(), StalledHead(steps=1)
    module.frozen = {"a"}
    stall(callback, module, run, 0.0)
    module.frozen = set()
    callback.on_gradients(run, module, {"head/b": 1.0})
    assert module.scaled == []


def test_a_constant_reward_is_told_and_no_rate_raised(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its gradient: a KL of its own keeps it above the threshold. Once until the reward differs again; steps
    in which it did not differ count for no raise."""
    module, run, callback = Headed("a", "b"), Trained(), StalledHead(steps=2)
    told = []
    for flat, norm in [(1, 1e-4), (1, 1e-4), (1, 0), (0.9, 0), (1, 0), (1, 0), (0.9, 0), (1, 1e-4)]:
        module.flat["a"] = flat
        stall(callback, module, run, norm)
        told.append((len(run.events), len(module.scaled)))
        again = StalledHead(steps=2)  # as a resume would
        again.load_state_dict(callback.state_dict())
        callback = again
    assert told == [(0, 0), (1, 0), (1, 0), (1, 0), (1, 0), (2, 0), (3, 1), (3, 1)]
    assert "constant reward: a has not differed in any group for 2 steps; its head learns nothing of it" in caplog.text
    assert "(adv/zero_std/a is 1)" in caplog.text


def test_a_reward_that_differs_in_one_of_the_updates_of_a_step() -> None:
    module, run, callback = Headed("a", "b", every=3), Trained(), StalledHead(steps=1)
    for flat in (1.0, 0.5, 1.0):
        module.flat["a"] = flat
        stall(callback, module, run, 1e-4)
        again = StalledHead(steps=1)
        again.load_state_dict(callback.state_dict())
        callback = again
    assert run.events == []
    for _ in range(3):
        module.flat["a"] = 1.0
        stall(callback, module, run, 1e-4)
    assert (run.events, module.scaled) == (["stalled_head"], [])


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"alpha": {"a": 1e-5, "b": 1.0}}, "its fusion weight is 1e-05"),
        ({"clipped": {"a": 0.75}}, "its tokens are clipped (75% of all)"),
        ({}, "the reward differs within groups, the fusion weight is not small and no token is clipped"),
    ],
)
def test_the_cause(facts: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    module, run, callback = Headed("a", "b"), Trained(), StalledHead(steps=1)
    for name, value in facts.items():
        getattr(module, name).update(value)
    stall(callback, module, run, 0.0)
    assert said in caplog.text
    assert "the head of a has had no gradient for a step: its rate x 1.1" in caplog.text


def test_a_constant_reward_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Six batches, heads step at every third: two steps without a difference. With a KL of the heads' own there is a
    gradient all the same, far above the threshold. `GradientNormRatio` leaves that head alone, too."""
    callback = StalledHead(steps=2)
    module = decoupled(rewards=REWARDS | {"low": here(same)})
    watch, run = fit(module, tmp_path, callbacks=[callback, GradientNormRatio(control=True)], max_epochs=3)
    assert watch.logged[-1]["grad_norm/head/low"] > 1e-7
    assert module.schedulables["optim.lr/low"].factor("stalled") == 1.0
    assert caplog.text.count("constant reward: low has not differed in any group for 2 steps") == 1
    rates = {group["part"]: group["lr"] / OPTIM.lr for group in run.optimizers[0].param_groups}
    assert rates["heads.subs.1."] == pytest.approx(1.0)
    assert rates["heads.subs.0."] != pytest.approx(1.0)
    assert watch.logged[-1]["grad/factor/head/low"] == 1.0
    assert "grad/dev/head/low" not in watch.logged[-1]


def test_a_gradient_that_is_gone_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under a threshold that every gradient is below: after two steps of the heads each has a higher rate."""
    callback = StalledHead(steps=2, threshold=1e6)
    _, run = fit(decoupled(**FREE), tmp_path, callbacks=[callback], max_epochs=3)
    assert "the head of low has had no gradient for 2 steps: its rate x 1.1; the reward differs within" in caplog.text
    rates = {group["part"]: group["lr"] / OPTIM.lr for group in run.optimizers[0].param_groups}
    assert rates == pytest.approx({"": 1.0, **{f"heads.subs.{k}.": 1.1 for k in range(3)}})


def test_clipped_tokens_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A clip range of hardly any width: from the second update on many tokens are outside. What the callback is told
    agrees with the metric of the combined loss where there is one reward."""
    seen = []

    class Look(StalledHead):
        def on_gradients(self, trainer: Any, module: Any, norms: Any) -> None:
            super().on_gradients(trainer, module, norms)
            seen.append(dict(module.clipped))

    settings = {"loss_args": {"low": 1e-4, "high": 1e-4}, "epochs": 4, "rewards": {"odd": here()}}
    watch, _ = fit(decoupled(**(FREE | settings)), tmp_path, callbacks=[Look()], max_epochs=1)
    assert [facts["odd"] for facts in seen] == pytest.approx(
        [update["clip_ratio/region_mean"] for update in watch.updates], abs=1e-6
    )
    assert seen[0]["odd"] == 0.0
    assert seen[1]["odd"] > 0.0


# ---------------------------------------------------------------------- FusionStability


def fuse(callback: FusionStability, module: Any, run: Any, *weights: float) -> list[float]:
    """Mean fusion weights (w, 1 - w), one after the other -> the bonus after each."""
    found = []
    for weight in weights:
        module.alpha = {"a": weight, "b": 1 - weight}
        callback.on_gradients(run, module, {})
        found.append(module.fusion_entropy)
    return found


def test_jitter_by_hand() -> None:
    """From .2 to .8 and back: |change| is 1.2, so the average is .12, .228, .3252, ...: above .1 at once, and with a
    rest of two updates .01 -> .015 -> .0225 at every third."""
    module, run, callback = Headed("a", "b"), Trained(), FusionStability(cooldown=2)
    found = fuse(callback, module, run, 0.2, 0.8)
    again = FusionStability(cooldown=2)
    again.load_state_dict(callback.state_dict())
    found += fuse(again, module, run, 0.2, 0.8, 0.2, 0.8, 0.2)
    assert found == pytest.approx([0.01, 0.015, 0.015, 0.015, 0.0225, 0.0225, 0.0225])
    jitter = [row["fusion/jitter"] for row in module.noted]
    assert jitter[:4] == pytest.approx([0.0, 0.12, 0.228, 0.3252])
    assert run.events == ["fusion_stability"] * 2


def test_a_slow_move_is_no_jump_and_the_bonus_has_a_bound() -> None:
    module, run, callback = Headed("a", "b"), Trained(), FusionStability()
    fuse(callback, module, run, *[0.2 + 0.04 * n for n in range(15)])  # |change| .08
    assert run.events == []
    callback = FusionStability(cooldown=0, largest=0.02)
    assert fuse(callback, module, run, *[0.0, 1.0] * 4)[-1] == pytest.approx(0.02)
    assert run.events == ["fusion_stability"] * 2


def test_batches_of_one_head_do_not_count() -> None:
    module, run, callback = Headed("a", "b"), Trained(), FusionStability()
    fuse(callback, module, run, 0.5)
    module.alpha = {"a": 1.0}
    callback.on_gradients(run, module, {})
    fuse(callback, module, run, 0.5)
    assert callback.jitter == 0.0
    assert len(module.noted) == 2


def test_fusion_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The jitter of the logged weights."""
    module = decoupled(heads={"every": 1})
    watch, _ = fit(module, tmp_path, callbacks=[FusionStability(limit=1e-4)], max_epochs=3)
    weights = [[row[f"fusion/alpha/{name}"] for name in NAMES] for row in watch.logged]
    jitter, found = 0.0, []
    for before, now in pairwise(weights):
        jitter = 0.9 * jitter + 0.1 * sum(abs(a - b) for a, b in zip(now, before, strict=True))
        found.append(jitter)
    assert [row["fusion/jitter"] for row in watch.logged[1:]] == pytest.approx(found, abs=1e-6)
    assert module.fusion_entropy == pytest.approx(0.015)
    assert "fusion.entropy 0.01 -> 0.015" in caplog.text


# ---------------------------------------------------------------------- FocusReward


def evaluate(callback: FocusReward, module: Any, run: Any, **values: float) -> None:
    """One update, then an evaluation with these means."""
    callback.on_gradients(run, module, {})
    run.global_step += 1
    run.callback_metrics = {f"val/rewards/{name}/mean": value for name, value in values.items()}
    callback.on_validation_end(run, module)


def test_focus_by_hand() -> None:
    """Of two rewards at .2 and .8: half of an even share is .25. `a` does not rise for two evaluations; `b` does not
    either, but has weight. Two steps later both learn again."""
    module, run = Headed("a", "b"), Trained()
    module.alpha = {"a": 0.2, "b": 0.8}
    callback = FocusReward(evaluations=2, steps=2)
    for a in (1.0, 2.0, 2.0):
        evaluate(callback, module, run, a=a, b=5.0)
    assert module.frozen == set()
    evaluate(callback, module, run, a=1.9, b=5.0)
    assert (module.frozen, callback.focus, run.events) == ({"b"}, "a", ["focus_reward"])
    again = FocusReward(evaluations=2, steps=2)
    again.load_state_dict(callback.state_dict())
    evaluate(again, module, run, a=1.9, b=5.0)
    assert module.frozen == {"b"}
    again.on_gradients(run, module, {})  # of the second of its steps
    assert module.frozen == {"b"}
    run.global_step += 1
    again.on_gradients(run, module, {})
    assert (module.frozen, run.events) == (set(), ["focus_reward", "focus_reward_end"])


@pytest.mark.parametrize(
    ("weights", "values"),
    [
        ({"a": 0.3, "b": 0.7}, [1.0] * 6),  # enough weight
        ({"a": 0.2, "b": 0.8}, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),  # rises
        ({"a": 0.2, "b": 0.8}, [1.0, math.nan, 1.0, math.nan, math.nan, 1.1]),  # not measured
    ],
)
def test_no_reason_to_focus(weights: dict[str, float], values: list[float]) -> None:
    module, run, callback = Headed("a", "b"), Trained(), FocusReward(evaluations=3)
    module.alpha = weights
    for value in values:
        evaluate(callback, module, run, a=value, b=5.0)
    assert run.events == []


def test_heads_that_somebody_else_froze_stay_frozen() -> None:
    module, run, callback = Headed("a", "b", "c"), Trained(), FocusReward(evaluations=1, steps=1)
    module.alpha, module.frozen = {"a": 0.1, "b": 0.4, "c": 0.5}, {"c"}
    for _ in range(2):
        evaluate(callback, module, run, a=1.0)
    assert module.frozen == {"b", "c"}
    run.global_step += 1
    callback.on_gradients(run, module, {})
    assert module.frozen == {"c"}


def test_focus_in_a_run(tmp_path: Path) -> None:
    """`low` never rises. With a tenth of the weight of the others it has little say; they stand still for two of
    the steps that follow."""
    seen, callback = Weights(), FocusReward(evaluations=2, steps=2)
    settings = {"heads": {"every": 1}, "rewards": REWARDS | {"low": here(same, weight=0.1)}}
    module = decoupled(**settings)
    fit(module, tmp_path, callbacks=[callback, seen], max_epochs=4, limit_val_batches=1, num_sanity_val_steps=0)
    stood = [{"odd", "length"} - step for step in seen.moved()]
    assert [bool(step) for step in stood].count(True) == 2
    first = next(n for n, step in enumerate(stood) if step)
    assert stood[first] == stood[first + 1] == {"odd", "length"}
    assert "trunk" in seen.moved()[first]
    assert "low" in seen.moved()[first]


def test_focus_without_validation(tmp_path: Path) -> None:
    module = decoupled()
    with pytest.raises(UserError, match="FocusReward watches rewards of validation, and this run has none: give it"):
        fit(module, tmp_path, callbacks=[FocusReward()], limit_val_batches=0)
    assert module.batches_seen == 0


# ---------------------------------------------------------------------- all of them


ACTING: dict[str, Any] = {
    "stalled": (decoupled, lambda: [StalledHead(steps=1, threshold=1e6)]),
    "fusion": (lambda: decoupled(heads={"every": 1}), lambda: [FusionStability(limit=1e-6, cooldown=1)]),
    "focus": (lambda: dead(heads={"every": 1, "kl": 0.0}), lambda: [FocusReward(evaluations=1, steps=2, share=1.0)]),
    "all": (
        lambda: dead(isolation={"mode": "project", "level": "states"}),
        lambda: [
            GradientNormRatio({"odd": 1.2}, control=True),
            GradientNormRatio(of="heads", control=True),
            StalledHead(steps=1),
            FusionStability(limit=1e-6, cooldown=1),
            FocusReward(evaluations=1, steps=2, share=1.0),
            RegressionGuard(evaluations=1, share=0.999),
        ],
    ),
}


@pytest.mark.parametrize("after", [2, 4])
@pytest.mark.parametrize("name", list(ACTING))
def test_resume(name: str, after: int, tmp_path: Path) -> None:
    module, callbacks = ACTING[name]

    def look(module: Any) -> Any:
        return weights_of(module), module.fusion_entropy, sorted(module.frozen)

    whole, part, resumed = ends(tmp_path, after, module, callbacks, look)
    plain = ends(tmp_path, after, module, list, look)[0]
    assert resumed == whole != part
    assert whole != plain  # it did act


def test_without_a_reason_nothing_changes(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [StalledHead(), FusionStability(), FocusReward()]):
        module = decoupled()
        fit(module, tmp_path, callbacks=callbacks, limit_val_batches=1, num_sanity_val_steps=0)
        found.append(weights_of(module))
    assert found[0] == found[1]


def test_a_run_that_goes_on_without_its_callback_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, value, said in (("frozen", {"low"}, "heads are frozen (low)"), ("only", "odd", "only odd learns")):
        module = decoupled()
        setattr(module, name, value)
        _, run = fit(module, tmp_path, plugins=[SafeCheckpointIO()], max_steps=1)
        run.save_checkpoint(tmp_path / f"{name}.ckpt")
        assert said not in caplog.text
        DecoupledPO.load_from_checkpoint(tmp_path / f"{name}.ckpt", rewards=REWARDS)
        assert said in caplog.text


def test_rates_survive_going_back_to_a_checkpoint(tmp_path: Path) -> None:
    """Non-finite updates bring back weights and moments; what a callback has set since stays, and can be set anew."""
    rates = []

    class Back(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            if module.batches_seen == 1:
                for factor in (1.5, 2.0):
                    module.scale_head("low", "test", factor)
                    assert roll_back(module) is not None
                    rates.append({g["part"]: g["lr"] / OPTIM.lr for g in trainer.optimizers[0].param_groups})

    keep = Checkpoint(dirpath=tmp_path, every_n_train_steps=1)
    settings = {"plugins": [SafeCheckpointIO()], "enable_checkpointing": True, "max_steps": 2}
    fit(decoupled(), tmp_path, callbacks=[Back(), keep], **settings)
    for found, factor in zip(rates, (1.5, 2.0), strict=True):
        assert found == pytest.approx({"": 1.0, "heads.subs.0.": 1.0, "heads.subs.1.": factor, "heads.subs.2.": 1.0})


@pytest.mark.parametrize("callback", [StalledHead, FusionStability, FocusReward])
def test_modules_without_heads(callback: Any, tmp_path: Path) -> None:
    said = f"{callback.__name__} needs a policy with heads"
    with pytest.raises(UserError, match=said) as caught:
        fit(online(GRPO), tmp_path, callbacks=[callback()])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=f"{said} .*not a SFT"):
        fit(SFT(policy=TINY, optim=OPTIM), tmp_path, FixedData(groups(8, 1)), callbacks=[callback()])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StalledHead(steps=0), "steps is 0"),
        (lambda: StalledHead(threshold=0.0), "threshold 0"),
        (lambda: StalledHead(factor=3.0), "factor 3.0 and cap 2.0"),
        (lambda: StalledHead(cap=math.inf), "cap inf"),
        (lambda: FusionStability(limit=0.0), "limit is 0"),
        (lambda: FusionStability(factor=1.0), "factor 1.0"),
        (lambda: FusionStability(cooldown=-1), "cooldown -1"),
        (lambda: FocusReward(evaluations=0), "evaluations is 0"),
        (lambda: FocusReward(steps=0), "steps 0"),
        (lambda: FocusReward(share=1.5), "share 1.5"),
        (lambda: FocusReward(min_rise=-1.0), "min_rise -1"),
    ],
)
def test_bad_settings(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fusion", [{"entropy": 0.0}, {"mode": "decode_only"}])
def test_a_bonus_that_cannot_be_multiplied(fusion: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"FusionStability multiplies fusion\.entropy"):
        fit(decoupled(fusion=fusion), tmp_path, callbacks=[FusionStability()])
