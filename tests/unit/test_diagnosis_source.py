"""Where the doctor's rows come from: folders of runs, MLflow, other trainers' names, runs that were resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from alignment import runs
from alignment.cli import main
from alignment.diagnosis_source import find, of_folder, own_names, settled
from alignment.errors import UserError
from tests.doctor_toys import recorded, up
from tests.unit.test_diagnosis import FAULTS, sampled


def folder(root: Path, run: str, rows: list[Any], **record: Any) -> Path:
    path = runs.run_folder(root, "alignment", run)
    runs.write_record(path, {"run_id": run, "started": 1.0, "trains": True, **record})
    lines = (json.dumps({"step": step, "time": 0.0, **values}) + "\n" for step, values in rows)
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["doctor", *words]) == code
    out = capsys.readouterr()
    return out.out or out.err


# ---------------------------------------------------------------------- names


def test_names_of_other_trainers() -> None:
    theirs = {
        "train/rewards/warm/mean": 1.0,
        "train/entropy": 2.0,
        "eval/reward": 3.0,
        "eval_rewards/chosen": 4.0,
        "learning_rate": 5.0,
        "policy/entropy_avg": 6.0,
        "objective/scores": 7.0,
        "val/ratio": 8.0,
        "train_runtime": 9.0,
    }
    assert own_names(theirs) == {
        "rewards/warm/mean": 1.0,
        "entropy": 2.0,
        "val/reward": 3.0,
        "val/rewards/chosen": 4.0,
        "lr": 5.0,
        "policy/entropy_avg": 6.0,  # the row has an `entropy` of its own
        "reward": 7.0,
        "ratio": 8.0,
    }


def test_a_resumed_run_counts_once() -> None:
    """It stopped after step 6, its checkpoint was at 4; and somebody has evaluated step 2 since."""
    rows = [(s, {"loss": float(s)}) for s in (0, 2, 4, 6)] + [(4, {"val/reward": 0.5}), (4, {"loss": 4.5})]
    rows += [(6, {"loss": 6.5}), (8, {"loss": 8.0}), (2, {"val/reward": 9.0}), (2, {"epoch": 0.0}), (9, {})]
    assert settled(rows) == [
        *[(s, {"loss": float(s)}) for s in (0, 2)],
        (4, {"loss": 4.5}),
        (6, {"loss": 6.5}),
        (8, {"loss": 8.0}),
    ]


# ---------------------------------------------------------------------- folders


def test_by_folder_id_name_and_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path, "aaa", sampled(), run_name="mine", started=1.0)
    path = folder(tmp_path, "bbb", FAULTS["dead_groups"], run_name="mine", started=2.0, model="modules.GRPO")
    folder(tmp_path, "ccc", sampled(), started=3.0, trains=False)
    root = ["--root", str(tmp_path)]
    report = printed(capsys, "bbb", *root)
    assert report.startswith("run bbb modules.GRPO 'mine': 40 training rows, steps 0 to 39: 1 alarm\n")
    assert "dead_groups, from step" in report
    assert "change    model.dynamic_sampling: 3: other prompts in place of those" in report
    assert printed(capsys, "last", *root) == report
    assert printed(capsys, str(path)) == report
    assert printed(capsys, "mine", *root) == "the newest of 2 runs of that name\n" + report
    assert printed(capsys, "bbb", *root, "--fail", code=1) == report
    assert ": no alarm\n" in printed(capsys, "aaa", *root, "--fail")


def test_a_run_that_is_still_writing(tmp_path: Path) -> None:
    path = folder(tmp_path, "aaa", sampled())
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    assert len(of_folder(path).rows) == 40
    with (path / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 41, "loss": 1.0}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 41 is damaged"):
        of_folder(path)


def test_rewards_without_weight_are_read_from_the_configuration(tmp_path: Path) -> None:
    path = folder(tmp_path, "aaa", sampled())
    assert of_folder(path).held_out == ()
    (path / "config").mkdir()
    for text, held_out in (
        ("model: {init_args: {rewards: {a: my.reward, b: {weight: 0}, c: {weight: 0.5}}}}", ("b",)),
        ("model: {init_args: {beta: 0.1}}", ()),
        ("model: [", ()),
    ):
        (path / "config" / "fit.yaml").write_text(text)
        assert of_folder(path).held_out == held_out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(tmp_path)]
    assert "no run 'none' below" in printed(capsys, "none", *root, code=2)
    folder(tmp_path, "aaa", [])
    assert "run aaa has logged no metrics yet" in printed(capsys, "aaa", *root, code=2)
    folder(tmp_path, "bbb", sampled())
    assert "--held_out val/truth: run bbb has not logged it" in printed(
        capsys, "bbb", *root, "--held_out", "val/truth", code=2
    )
    assert "every is 0" in printed(capsys, "bbb", *root, "--every", "0", code=2)


# ---------------------------------------------------------------------- MLflow


def tracked(name: str, rows: list[Any], **params: Any) -> tuple[str, str]:
    """(id of a run in the working directory's MLflow that somebody else logged, address)."""
    address = f"sqlite:///{Path.cwd()}/mlflow.db"
    client = MlflowClient(address)
    run = client.create_run("0", run_name=name).info.run_id
    for key, value in params.items():
        client.log_param(run, key, value)
    entries = [Metric(k, v, 1000 * i, step) for i, (step, row) in enumerate(rows) for k, v in row.items()]
    for start in range(0, len(entries), 900):
        client.log_batch(run, metrics=entries[start : start + 900])
    return run, address


def as_trl(rows: list[Any]) -> list[Any]:
    """The rows as TRL's GRPO gives them to MLflow: at steps 1, 2, ...; evaluations as `eval_...`."""
    left_out = ("ratio", "policy/approxkl_avg", "completions/repetition", "reward_length_slope", "explained_variance")
    return [
        (step + 1, {k.replace("val/", "eval_"): v for k, v in row.items() if k not in left_out}) for step, row in rows
    ] + [(len(rows), {"train_runtime": 9.0, "train_loss": 0.1})]


def test_a_run_that_trl_has_logged(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by its id, and by its name; rules that lack a metric say so."""
    run, address = tracked("trl-grpo", as_trl(FAULTS["reward_hacking"]))
    report = printed(capsys, run, "--tracking_uri", address)
    assert report.startswith(f"run {run} 'trl-grpo': 40 training rows, steps 1 to 40: 1 alarm\n")
    assert "evidence  val/reward" in report
    assert "critic_divergence" in report.split("not asked")[0]  # its loss alone, over two windows
    assert printed(capsys, "trl-grpo") == report  # mlflow.db of the working directory
    tracked("trl-grpo", as_trl(sampled()))
    assert printed(capsys, "trl-grpo", "--fail").startswith("the newest of 2 runs of that name\n")


def test_ppo_of_trl(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"reward": "objective/scores", "entropy": "policy/entropy_avg", "ratio": "val/ratio"}
    rows = [
        (step, {names.get(k, k): v for k, v in row.items() if k not in ("loss", "kl", "frac_reward_zero_std")})
        for step, row in sampled(entropy=up(1.5, 0.05), reward=0.3)
    ]
    tracked("ppo", rows)
    assert "entropy_collapse, from step" in printed(capsys, "ppo")


def test_a_reward_without_weight_is_read_from_the_parameters(workdir: Path) -> None:
    params = {"rewards/truth/weight": "0.0", "rewards/warm/weight": "1.0", "rewards/odd/weight": "None"}
    run, address = tracked("ours", sampled()[:2], **params)
    assert find(run, workdir, address).held_out == ("truth",)


def test_no_such_run_in_mlflow(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("none", "no run's name", 'a "b"'):
        assert f"there is no run '{name}' in this MLflow" in printed(capsys, name, code=2)


def test_what_trl_really_logs(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GRPO of TRL 1.16 (benchmarks/doctor_trl.py), as MLflow keeps it: one reward is the same for everything, and no
    story of 16 tokens ends."""
    rows = recorded("trl_grpo")
    assert any("eval_reward" in row for _, row in rows)
    run, address = tracked("trl", rows)
    report = printed(capsys, run, "--tracking_uri", address, "--fail", code=1)
    assert ": 12 training rows, steps 1 to 12: 2 alarms\n" in report
    assert re.findall(r"^(\w+), from step", report, flags=re.MULTILINE) == ["truncation", "constant_reward"]
    assert "the reward 'same' is the same for every completion" in report
    quiet = report.split("nothing seen: ")[1].splitlines()[0].split(", ")
    assert {"dead_groups", "clip_saturation", "length_drift"} <= set(quiet)
