"""One value, several that move it: arithmetic by hand, one writer, what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.optim import OptimConfig, build_optimizer, build_schedule, lr_factor, refresh
from alignment.schedulable import Schedulable, Schedulables, of
from modules import DPO, GRPO, DecoupledPO
from tests.rl_toys import fit, online
from tests.toys import OPTIM, TINY, FixedData, groups, trainer
from tests.unit.test_decoupled_po import REWARDS, decoupled


def test_base_times_factors_plus_additions() -> None:
    """.2 x .8 x 1.5 = .24, and .05 on top; each cause replaces its own factor alone."""
    beta = Schedulable("beta", 0.1)
    assert beta.value == 0.1
    beta.own("stages")
    beta.write(0.2, "stages")
    beta.scale("plateau", 0.5)
    beta.scale("batch", 1.5)
    beta.scale("plateau", 0.8)
    assert beta.value == pytest.approx(0.24)
    beta.add("guard", 0.02)
    beta.add("guard", 0.05)
    assert beta.value == pytest.approx(0.29)
    assert beta.without("batch") == pytest.approx(0.21)
    beta.unscale("batch")
    assert beta.value == pytest.approx(0.21)


def test_the_order_in_which_causes_come_does_not_matter() -> None:
    a, b = Schedulable("beta", 0.1), Schedulable("beta", 0.1)
    moves = {"x": 1.1, "y": 0.7, "z": 1.3}
    for cause, factor in moves.items():
        a.scale(cause, factor)
    for cause, factor in reversed(moves.items()):
        b.scale(cause, factor)
    assert a.value == b.value


def test_one_writer() -> None:
    beta = Schedulable("beta", 0.1)
    beta.own("callbacks.Stages")
    beta.own("callbacks.Stages")
    with pytest.raises(UserError, match=r"mine and callbacks\.Stages would both set beta; leave one of them out"):
        beta.own("mine")
    with pytest.raises(UserError, match=r"beta is set by callbacks\.Stages; nothing else may assign it"):
        beta.write(0.3)


def test_a_controller_is_the_writer_and_factors_multiply_what_it_says() -> None:
    class Controller:
        coefficient = 0.2

    controller = Controller()
    kl = Schedulable("kl.coefficient", 0.2, follow=of(controller, "coefficient"), writer="kl.target")
    with pytest.raises(UserError, match=r"callbacks\.Stages and kl\.target would both set kl\.coefficient"):
        kl.own("callbacks.Stages")
    kl.scale("plateau", 0.5)
    controller.coefficient = 0.3
    assert kl.value == pytest.approx(0.15)


def test_what_cannot_be_moved_says_why() -> None:
    kl = Schedulable("kl.coefficient", 0.0, blocked="no reference is loaded")
    for move in (kl.own, kl.claim):
        with pytest.raises(UserError, match=r"kl\.coefficient cannot be moved: no reference is loaded"):
            move("x")


def test_names_that_are_not_there() -> None:
    known = Schedulables()
    known.register(Schedulable("beta", 0.1))
    with pytest.raises(UserError, match=r"here: there is no value 'betta' to move here; there are beta; did you mean"):
        known.find("betta", "here")


@pytest.mark.parametrize(("name", "value"), [("beta", 0.0), ("beta", -1.0), ("lambda1", -0.1), ("x", float("inf"))])
def test_values_that_are_none(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"there: {name} is {value}"):
        Schedulable(name, 0.1).check(value, "there")
    Schedulable("lambda1", 0.1).check(0.0, "there")


# ---------------------------------------------------------------------- state


def saved_and_loaded(configured: float, claims: tuple[str, ...] = ()) -> Schedulable:
    """.2 by a writer, x .8 by a plateau; loaded where `configured` is what is given."""
    old = Schedulable("beta", 0.1)
    old.own("stages")
    old.write(0.2, "stages")
    old.scale("plateau", 0.8)
    new = Schedulable("beta", configured)
    for cause in claims:
        new.claim(cause)
    new.load_state_dict(old.state_dict())
    return new


def test_state() -> None:
    assert saved_and_loaded(0.1).value == pytest.approx(0.16)
    found = saved_and_loaded(0.1, ("plateau",))
    found.settle()
    assert found.value == pytest.approx(0.16)


def test_a_factor_nobody_stands_for_goes_when_training_starts(caplog: pytest.LogCaptureFixture) -> None:
    found = saved_and_loaded(0.1)
    found.settle()
    assert found.value == 0.2
    assert "beta: the x 0.8 of 'plateau' goes; this run has no such callback" in caplog.text


def test_a_setting_given_anew_is_the_value(caplog: pytest.LogCaptureFixture) -> None:
    found = saved_and_loaded(0.9, ("plateau",))
    assert found.value == 0.9
    assert "beta stays at 0.9 as given; the checkpoint had 0.2" in caplog.text


# ---------------------------------------------------------------------- modules


def test_attributes_of_modules_read_what_is_in_force() -> None:
    module = DPO(policy=TINY, beta=0.1)
    assert module.beta == 0.1
    module.schedulables["beta"].scale("plateau", 0.5)
    assert module.beta == 0.05
    module.beta = 0.4
    assert module.beta == 0.2
    assert module.schedulables["beta"].configured == 0.1
    assert DPO(policy=TINY, beta=0.3).beta == 0.3


def test_two_modules_do_not_share_a_value() -> None:
    a, b = DPO(policy=TINY, beta=0.1), DPO(policy=TINY, beta=0.2)
    a.schedulables["beta"].scale("x", 3.0)
    assert b.beta == 0.2


def test_names_of_each_module() -> None:
    names = {
        DPO: ["optim.lr", "beta"],
        GRPO: ["optim.lr", "kl.coefficient", "entropy.coefficient"],
    }
    assert list(DPO(policy=TINY).schedulables) == names[DPO]
    assert list(online(GRPO).schedulables) == names[GRPO]
    heads = [f"optim.lr/{name}" for name in REWARDS]
    assert set(decoupled().schedulables) == {*names[GRPO], "fusion.entropy", *heads}


class Moves(L.Callback):
    """From the second batch on, factors on some values."""

    def __init__(self, **factors: float) -> None:
        self.factors = {name.replace("__", "."): factor for name, factor in factors.items()}

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if module.batches_seen == 1:
            for name, factor in self.factors.items():
                module.schedulables[name].scale("test", factor)


def test_the_value_in_force_is_logged_and_nothing_is_where_nothing_moves(tmp_path: Path) -> None:
    data = FixedData(groups(8, 2), batch_size=4)
    module = DPO(policy=TINY, optim=OPTIM, beta=0.1)
    watch, _ = fit(module, tmp_path, data, callbacks=[Moves(beta=0.5)])
    assert not any(name.startswith("schedule/") for name in watch.logged[0])
    assert watch.logged[1]["schedule/beta"] == pytest.approx(0.05)
    assert watch.updates[1]["beta"] == pytest.approx(0.05)
    plain, _ = fit(DPO(policy=TINY, optim=OPTIM, beta=0.1), tmp_path, data)
    assert not any(name.startswith("schedule/") for row in plain.logged for name in row)


def test_the_coefficients_of_a_module_that_samples(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kl": {"coefficient": 0.2}, "entropy": {"coefficient": 0.1}}
    watch, _ = fit(online(GRPO, **settings), tmp_path, callbacks=[Moves(kl__coefficient=0.5, entropy__coefficient=2.0)])
    assert [row["kl_coefficient"] for row in watch.logged] == pytest.approx([0.2, 0.1])
    assert [row["entropy_coefficient"] for row in watch.logged] == pytest.approx([0.1, 0.2])


# ---------------------------------------------------------------------- the learning rate


def test_the_rate_is_the_schedule_times_what_callbacks_say() -> None:
    """Linear from 1 over 4 steps with peak .4: .4, .3; then half of it: .1, .05."""
    weight = nn.Parameter(torch.ones(1))
    config, share = OptimConfig(lr=0.4, schedule="linear", optimizer="sgd"), [1.0]
    optimizer = build_optimizer([("w", weight)], config, 0.4)
    schedule = build_schedule(optimizer, config, 4, lambda: share[0])
    rates = []
    for step in range(4):
        if step == 2:
            share[0] = 0.5
            refresh(optimizer, schedule, None)
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.4, 0.3, 0.1, 0.05])


def test_a_rate_that_nothing_moves_is_the_schedules_bit_for_bit(tmp_path: Path) -> None:
    optim = OptimConfig(lr=3e-4, warmup_steps=2)
    watch, _ = fit(DPO(policy=TINY, optim=optim), tmp_path, FixedData(groups(20, 2), batch_size=4))
    assert [row["lr"] for row in watch.updates] == [3e-4 * lr_factor(step, optim, 5) for step in range(5)]


def test_the_rate_of_a_run(tmp_path: Path) -> None:
    """Constant 1e-3, halved from the second batch on; a head's factor is one more."""
    data = FixedData(groups(8, 2), batch_size=4)
    watch, _ = fit(DPO(policy=TINY, optim=OPTIM), tmp_path, data, callbacks=[Moves(optim__lr=0.5)])
    assert [row["lr"] for row in watch.updates] == pytest.approx([1e-3, 5e-4])
    module = decoupled(heads={"every": 1})
    name = next(iter(REWARDS))
    moves = {"optim.lr": 0.5, f"optim.lr/{name}": 1.5}
    callback = Moves()
    callback.factors = moves
    _, run = fit(module, tmp_path, callbacks=[callback])
    rates = {group["part"]: group["lr"] for group in run.optimizers[0].param_groups}
    assert rates["heads.subs.0."] == pytest.approx(0.75e-3)
    assert rates[""] == pytest.approx(0.5e-3)
    assert rates["heads.subs.1."] == pytest.approx(0.5e-3)


def test_a_moved_rate_resumes(tmp_path: Path) -> None:
    """As it was while somebody stands for the factor; the schedule's own where nobody does; as given anew else."""

    class Claims(L.Callback):
        def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
            module.schedulables["optim.lr"].claim("test")

    data = FixedData(groups(16, 2), batch_size=4)
    module = DPO(policy=TINY, optim=OPTIM)
    settings = {"plugins": [SafeCheckpointIO()], "max_steps": 2}
    _, run = fit(module, tmp_path, data, callbacks=[Moves(optim__lr=0.5)], **settings)
    run.save_checkpoint(tmp_path / "c")
    found = []
    for callbacks, lr in (([Claims()], 1e-3), ([], 1e-3), ([Claims()], 8e-3)):
        again = DPO(policy=TINY, optim=OptimConfig(lr=lr, schedule="constant"))
        settings = {"plugins": [SafeCheckpointIO()], "max_steps": 3, "limit_val_batches": 0, "callbacks": callbacks}
        other = trainer(tmp_path, **settings)
        other.fit(again, datamodule=data, ckpt_path=str(tmp_path / "c"))
        found.append(other.optimizers[0].param_groups[0]["lr"])
    assert found == pytest.approx([5e-4, 1e-3, 8e-3])


def test_values_reach_a_checkpoint_of_a_policy_with_heads(tmp_path: Path) -> None:
    module = decoupled()
    module.schedulables["fusion.entropy"].scale("test", 3.0)
    _, run = fit(module, tmp_path, plugins=[SafeCheckpointIO()], max_steps=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = DecoupledPO.load_from_checkpoint(tmp_path / "a.ckpt", rewards=REWARDS)
    assert again.fusion_entropy == pytest.approx(0.03)
