"""RegressionGuard: sequences by hand, and runs of every module that samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.errors import UserError
from callbacks import RegressionGuard
from modules import GDPO, GRPO, MORL, PPO, SFT, DecoupledPO
from tests.callback_toys import Headed, Trained, ends
from tests.rl_toys import fit, here, odd_in_some, online, prompts
from tests.toys import OPTIM, TINY, FixedData, groups
from tests.unit.test_decoupled_po import REWARDS, decoupled, weights_of


def scores(callback: RegressionGuard, module: Any, run: Any, *values: float) -> list[float]:
    """The entropy coefficient after each evaluation."""
    found = []
    for value in values:
        run.callback_metrics = {"val/reward": torch.tensor(value)}
        callback.on_validation_end(run, module)
        found.append(module.entropy.coefficient)
    return found


def test_three_evaluations_below_nine_tenths_of_the_best() -> None:
    module, run, callback = Headed("a"), Trained(), RegressionGuard()
    assert scores(callback, module, run, 1.0, 0.89, 0.89) == [0.0, 0.0, 0.0]
    again = RegressionGuard()
    again.load_state_dict(callback.state_dict())
    assert scores(again, module, run, 0.89, 0.89, 0.89, 0.5) == pytest.approx([0.01, 0.01, 0.01, 0.02])
    assert run.events == ["regression_guard"] * 2


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 0.5, 0.5, 0.91, 0.5, 0.5, 0.95, 0.5, 0.5],  # never three in a row
        [1.0, *[0.9001] * 5],
        [-1.0, *[-1.09] * 5],  # below zero: a tenth of the best's size below it is -1.1
        [1.0, float("nan"), 0.5, float("nan"), 0.5],
    ],
)
def test_no_regression(values: list[float]) -> None:
    module, run = Headed("a"), Trained()
    assert scores(RegressionGuard(), module, run, *values)[-1] == 0.0


def test_scores_below_zero() -> None:
    module, run = Headed("a"), Trained()
    assert scores(RegressionGuard(), module, run, -1.0, -1.11, -1.11, -1.11)[-1] == pytest.approx(0.01)


def test_the_bonus_has_a_bound() -> None:
    module, run = Headed("a"), Trained()
    callback = RegressionGuard(evaluations=1, step=0.01, largest=0.025)
    assert scores(callback, module, run, 1.0, *[0.5] * 5) == pytest.approx([0.0, 0.01, 0.02, 0.025, 0.025, 0.025])
    assert run.events == ["regression_guard"] * 3


def test_the_sanity_check_does_not_count() -> None:
    module, run, callback = Headed("a"), Trained(), RegressionGuard()
    run.sanity_checking = True
    scores(callback, module, run, 9.0)
    assert callback.best == -float("inf")


# ---------------------------------------------------------------------- runs


class Fallen(RegressionGuard):
    """It has seen better days."""

    def __init__(self) -> None:
        super().__init__(evaluations=1, largest=1.0, step=0.5)
        self.best = 1e6


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {}),
        (GRPO, {"entropy": {"target": 0.1}}),
        (GDPO, {"rewards": REWARDS}),
        (PPO, {}),
        (MORL, {"rewards": REWARDS}),
        (DecoupledPO, {"rewards": REWARDS}),
    ],
)
def test_the_bonus_reaches_the_loss(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    """The second epoch's first update has another gradient than without, by the bonus: -.5 times that of the mean
    entropy."""
    found = []
    for callbacks in ([], [Fallen()]):
        module = online(kind, **settings)
        watch, _ = fit(
            module, tmp_path, callbacks=callbacks, max_epochs=2, limit_val_batches=1, num_sanity_val_steps=0
        )
        found.append(watch)
    each = len(found[0].updates) // 2
    assert [a["loss"] for a in found[0].updates[:each]] == [b["loss"] for b in found[1].updates[:each]]
    before, after = (watch.updates[each] for watch in found)
    assert after["loss"] == pytest.approx(before["loss"] - 0.5 * before["entropy"], rel=1e-4)
    assert found[1].logged[-1]["entropy_coefficient"] == pytest.approx(0.5, abs=0.02)


def test_completions_without_an_advantage_count_from_then_on(tmp_path: Path) -> None:
    """GRPO leaves them out while nothing but the advantage has a gradient."""
    data = FixedData(prompts(8, alive=[True, False] * 4), batch_size=4)
    module, read = online(GRPO, rewards={"odd": here(odd_in_some)}), []
    loss = module.loss

    def counted(micro: Any, counts: Any) -> Any:
        read.append(micro.num_completions)
        return loss(micro, counts)

    module.loss = counted
    fit(module, tmp_path, data, callbacks=[Fallen()], max_epochs=2, limit_val_batches=1, num_sanity_val_steps=0)
    assert all(count <= 8 for count in read[:2])
    assert read[2:] == [16, 16]


def test_resume(tmp_path: Path) -> None:
    def look(module: Any) -> Any:
        return weights_of(module), module.entropy.coefficient

    whole, part, resumed = ends(tmp_path, 3, decoupled, lambda: [Fallen()], look)
    assert resumed == whole != part
    assert whole[0][1] == 1.0


def test_without_a_regression_nothing_changes(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [RegressionGuard(evaluations=9)]):
        module = decoupled()
        fit(module, tmp_path, callbacks=callbacks, limit_val_batches=1, num_sanity_val_steps=0)
        found.append(weights_of(module))
    assert found[0] == found[1]


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"share": 1.0}, "share is 1.0"),
        ({"evaluations": 0}, "evaluations 0"),
        ({"step": 0.0}, "step 0"),
        ({"step": 0.2}, "step 0.2 and largest 0.1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        RegressionGuard(**settings)


def test_modules_that_do_not_sample(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"RegressionGuard needs a module that samples \(.*\), not a SFT"):
        fit(SFT(policy=TINY, optim=OPTIM), tmp_path, FixedData(groups(8, 1)), callbacks=[RegressionGuard()])


def test_a_run_without_validation(tmp_path: Path) -> None:
    module = online(GRPO)
    with pytest.raises(UserError, match="RegressionGuard watches a score of validation, and this run has none"):
        fit(module, tmp_path, callbacks=[RegressionGuard()], limit_val_batches=0)
    assert module.batches_seen == 0


def test_a_policy_without_an_entropy_bonus(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"which fusion\.pool=linear cannot have"):
        fit(decoupled(fusion={"pool": "linear"}), tmp_path, callbacks=[RegressionGuard()])


def test_a_score_that_is_not_logged(tmp_path: Path) -> None:
    """It is told at the sanity check, before anything is trained."""
    module = online(GRPO)
    with pytest.raises(UserError, match=r"watches val/rewrad, which is not logged; there is val/.*val/reward"):
        fit(module, tmp_path, callbacks=[RegressionGuard("val/rewrad")], limit_val_batches=1)
    assert module.batches_seen == 0
