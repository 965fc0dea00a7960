"""The Doctor callback: what it tells and where, what it does when asked to, and that it does nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from alignment.checkpoint import SafeCheckpointIO
from alignment.cli import main
from alignment.errors import UserError
from alignment.tracking import TrackingLogger
from callbacks import Doctor
from modules import DPO, GRPO, SFT
from tests.callback_toys import Leave, weights
from tests.loops import Recorder, Rows, loaders
from tests.rl_toys import fit, here, odd, online, prompts
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

REWARDS = {"odd": here(odd), "same": here(lambda completion: 0.5)}
KL = {"coefficient": 0.1}


def grpo(**settings: Any) -> Any:
    return online(GRPO, **({"rewards": REWARDS, "kl": KL} | settings))


def run(module: Any, folder: Path, doctor: Doctor, **settings: Any) -> tuple[Any, L.Trainer]:
    """14 batches: `same` is a constant reward from the tenth row on."""
    data = FixedData(prompts(4), batch_size=4)
    return fit(module, folder, data, callbacks=[doctor], **({"max_epochs": 14} | settings))


# ---------------------------------------------------------------------- telling


def test_log_metric_event_and_report(workdir: Path, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    """And the command says the same of the run that it has left."""
    logger = TrackingLogger(run_name="watched")
    run(grpo(), workdir, Doctor(every=5), logger=logger)
    logger.finalize("success")
    said = [record.message for record in caplog.records if record.message.startswith("doctor at step")]
    assert len(said) == 1
    assert said[0].startswith("doctor at step 9: constant_reward: the reward 'same' is the same for every completion")
    assert "Change model.rewards: mend same, or leave it out" in said[0]
    folder = logger.run_dir
    assert "doctor: constant_reward" in (folder / "events.txt").read_text()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(x["step"], x["doctor/constant_reward"]) for x in lines if "doctor/constant_reward" in x] == [
        (9, 1.0),
        (13, 1.0),
    ]
    report = (folder / "doctor.txt").read_text()
    assert report.startswith(f"run {folder.name} 'watched': 14 training rows, steps 0 to 13: 1 alarm\n")
    for name in ("watched", folder.name, str(folder), "last"):
        capsys.readouterr()
        assert main(["doctor", name, "--every", "5"]) == 0
        assert capsys.readouterr().out == report
    database = f"sqlite:///{workdir}/mlflow.db"
    assert main(["doctor", "watched", "--every", "5", "--tracking_uri", database, "--fail"]) == 1
    there = capsys.readouterr().out
    assert there.splitlines()[1:] == report.splitlines()[1:]


def test_another_logger(tmp_path: Path) -> None:
    rows = Rows()
    rows.save_dir = str(tmp_path)
    run(grpo(), tmp_path, Doctor(every=5), logger=rows)
    assert "constant_reward, from step 9" in (tmp_path / "rows" / "version_0" / "doctor.txt").read_text()
    assert [step for step, row in rows.rows if ("doctor/constant_reward", 1.0) in row] == [9, 13]


def test_it_measures_the_wait_for_data(tmp_path: Path) -> None:
    watch, _ = run(grpo(), tmp_path, Doctor(), max_epochs=3)
    shares = [logged["time/data_share"] for logged in watch.logged if "time/data_share" in logged]
    assert shares
    assert all(0 <= share <= 1 for share in shares)


def test_a_reward_without_weight_is_held_out(tmp_path: Path) -> None:
    doctor = Doctor()
    run(grpo(rewards={"odd": here(odd), "truth": here(odd, weight=0.0)}), tmp_path, doctor, max_epochs=1)
    assert doctor.examination.held_out == ("rewards/truth/mean", "val/rewards/truth/mean")
    own = Doctor(held_out=["val/other"])
    with pytest.warns(UserWarning, match="held_out names val/other, which was not logged"):
        run(grpo(), tmp_path, own, max_epochs=1)
    assert own.examination.held_out == ("val/other",)


def test_validations_are_taken_in_and_sanity_checks_are_not(tmp_path: Path) -> None:
    doctor = Doctor()
    run(grpo(), tmp_path, doctor, max_epochs=3, limit_val_batches=1, num_sanity_val_steps=1)
    assert len(doctor.examination.history.series()["val/reward"]) == 3


# ---------------------------------------------------------------------- doing nothing


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_it_changes_nothing(kind: str, tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [Doctor(every=1)]):
        module = grpo() if kind == "grpo" else DPO(policy=TINY, optim=OPTIM)
        data = FixedData(prompts(4), batch_size=4) if kind == "grpo" else FixedData(groups(8, 2), batch_size=4)
        watch, _ = fit(module, tmp_path, data, callbacks=callbacks, max_epochs=4)
        found.append((weights(module), [update["loss"] for update in watch.updates]))
    assert found[0] == found[1]


# ---------------------------------------------------------------------- acting


def acting(action: str, **settings: Any) -> Doctor:
    return Doctor(every=2, actions={"constant_reward": action}, **settings)


def test_raising_the_kl_again_while_the_fault_stays(tmp_path: Path) -> None:
    """Looks at rows 10, 12 and 14; patience 2: it acts at 10 and 14."""
    module, rows = grpo(), Rows()
    module.schedulables["kl.coefficient"].scale("another", 0.5)
    run(module, tmp_path, acting("raise_kl", patience=2), logger=rows)
    assert module.kl.coefficient == pytest.approx(0.1 * 0.5 * 1.5**2)
    assert [step for step, row in rows.rows if ("event/doctor_action", 1.0) in row] == [9, 13]


def test_it_acts_so_many_times_at_most(tmp_path: Path) -> None:
    module = grpo()
    run(module, tmp_path, acting("raise_kl", patience=1, times=2), max_epochs=20)
    assert module.kl.coefficient == pytest.approx(0.1 * 1.5**2)


def test_the_value_in_force_is_logged(tmp_path: Path) -> None:
    module = grpo()
    watch, _ = run(module, tmp_path, acting("lower_beta"))
    assert watch.logged[-1]["schedule/kl.coefficient"] == pytest.approx(0.08)
    assert watch.logged[5]["schedule/kl.coefficient"] == pytest.approx(0.1)


def test_raising_the_entropy(tmp_path: Path) -> None:
    module = grpo()
    run(module, tmp_path, acting("raise_entropy", patience=2))
    assert module.entropy.coefficient == pytest.approx(0.02)


def test_stopping(tmp_path: Path) -> None:
    module = grpo()
    run(module, tmp_path, acting("stop"))
    assert module.batches_seen == 10


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Bit for bit, but for what it measures of time: a run that leaves between two acts, and its resume."""
    saved, found = tmp_path / "here.ckpt", []
    for leave, start in ((None, None), (12, None), (None, saved)):
        module, doctor = grpo(), acting("raise_kl", patience=2)
        extra = [] if leave is None else [Leave(leave, saved)]
        loop = trainer(
            tmp_path, callbacks=[doctor, *extra], plugins=[SafeCheckpointIO()], max_epochs=16, limit_val_batches=0
        )
        loop.fit(module, datamodule=FixedData(prompts(4), batch_size=4), ckpt_path=start)
        state = doctor.state_dict()
        for name in ("time/data_share", "time/data_seconds"):
            del state["examination"]["history"][name]
        found.append((weights(module), module.kl.coefficient, state))
    whole, part, resumed = found
    assert resumed == whole
    assert part != whole
    assert whole[1] == pytest.approx(0.1 * 1.5**2)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, "every is 0"),
        ({"patience": 0}, "patience is 0 and times 4"),
        ({"times": 0}, "patience is 5 and times 0"),
        ({"actions": {"hacking": "stop"}}, "actions names hacking, no rule; there are reward_hacking, "),
        ({"actions": {"truncation": "panic"}}, "actions.truncation is 'panic'; use raise_kl, raise_entropy"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Doctor(**settings)


@pytest.mark.parametrize(
    ("action", "settings", "said"),
    [
        ("raise_kl", {"kl": {"coefficient": 0.0, "measure": True}}, "raise_kl multiplies kl.coefficient, which is 0"),
        ("raise_kl", {"kl": {"coefficient": 0.0}}, "kl.coefficient cannot be moved: at 0 no reference is loaded"),
        ("lower_beta", {"kl": {"coefficient": 0.1, "target": 1.0}}, "lower_beta and kl.target would both move"),
    ],
)
def test_values_that_no_action_can_move(action: str, settings: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(grpo(**settings), tmp_path, acting(action))


def test_modules_that_have_no_such_value(tmp_path: Path) -> None:
    data = FixedData(groups(4, 1), batch_size=4)
    with pytest.raises(UserError, match=r"a SFT has neither beta nor kl\.coefficient"):
        fit(SFT(policy=TINY, optim=OPTIM), tmp_path, data, callbacks=[acting("raise_kl")])
    with pytest.raises(UserError, match="raise_entropy needs a module with an entropy bonus"):
        fit(SFT(policy=TINY, optim=OPTIM), tmp_path, data, callbacks=[acting("raise_entropy")])


def test_modules_of_others(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Doctor is for this project's modules, not for a Recorder"):
        trainer(tmp_path, callbacks=[Doctor()]).fit(Recorder(), *loaders())
