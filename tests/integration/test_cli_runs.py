"""Whole runs through the command line: what they record (C22), checkpoints and flags (C23), resuming, two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient

import tests.cli_toys  # noqa: F401  # makes ToyModule and ToyData known by their short names
from alignment.checkpoint import load_checkpoint_folder, resolve
from alignment.cli import main
from tests.sandboxes import need_sandbox

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
TOYS = ["--model", "ToyModule", "--data", "ToyData", "--data.path", "here", "--trainer.accelerator", "cpu", *QUIET]
SAVE = "--trainer.callbacks+=callbacks.Checkpoint"
RUN = ["fit", *TOYS, "--trainer.max_steps", "4", "--trainer.log_every_n_steps", "1", SAVE]


def client(workdir: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{workdir}/mlflow.db")


def all_runs(workdir: Path) -> list[Any]:
    """Runs of the experiment `alignment`, oldest first."""
    tracker = client(workdir)
    experiment = tracker.get_experiment_by_name("alignment")
    assert experiment is not None
    return tracker.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def steps_of(workdir: Path, run_id: str) -> list[int]:
    """The steps at which a run logged its loss."""
    return [m.step for m in client(workdir).get_metric_history(run_id, "loss")]


def folder_of(workdir: Path, run: Any) -> Path:
    return workdir / "runs" / "alignment" / run.info.run_id


def config_of(workdir: Path, run: Any, file: str = "fit.yaml") -> dict[str, Any]:
    """The resolved configuration, from the run's artifacts."""
    return yaml.safe_load(Path(client(workdir).download_artifacts(run.info.run_id, f"config/{file}")).read_text())


def checkpoint_of(folder: Path) -> Path:
    return resolve("last", folder / "checkpoints").resolve()


# ---------------------------------------------------------------------- C22


def test_two_runs_of_one_command_in_one_folder(workdir: Path) -> None:
    note = "n" * 1000
    for _ in range(2):
        assert main([*RUN, "--model.note", note]) == 0
    first, second = all_runs(workdir)
    assert first.info.run_id != second.info.run_id
    for run in (first, second):
        assert run.info.status == "FINISHED"
        assert run.data.params["note"] == note
        assert run.data.params["seed"] == "0"
        assert run.data.params["data/class"].endswith("ToyData")
        assert config_of(workdir, run)["model"]["init_args"]["note"] == note
        assert [d.dataset.name for d in run.inputs.dataset_inputs] == ["ones"]
        assert steps_of(workdir, run.info.run_id) == [0, 1, 2, 3]
        assert checkpoint_of(folder_of(workdir, run)).is_dir()
    litter = {p.name for p in workdir.iterdir() if not p.name.startswith("mlflow.db")}
    assert litter == {"artifacts", "runs"}


def test_a_resume_adds_to_the_same_run(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--model.beta", "0.5"]) == 0
    assert main([*RUN, "--model.beta", "0.5", "--trainer.max_steps", "6", "--ckpt_path", "last"]) == 0
    (run,) = all_runs(workdir)
    assert f"continuing run {run.info.run_id}" in capsys.readouterr().out
    assert steps_of(workdir, run.info.run_id) == [0, 1, 2, 3, 4, 5]
    assert run.info.status == "FINISHED"
    assert config_of(workdir, run)["trainer"]["max_steps"] == 4
    assert config_of(workdir, run, "fit-1.yaml")["trainer"]["max_steps"] == 6


def test_fast_dev_run_leaves_nothing(workdir: Path) -> None:
    assert main(["fit", *TOYS, "--trainer.fast_dev_run", "2"]) == 0
    assert {p.name for p in workdir.iterdir()} == {"mlflow.db"}


# ---------------------------------------------------------------------- C23


@pytest.fixture
def trained(workdir: Path) -> Path:
    """The checkpoint of a run with beta 0.3 and lr 0.7."""
    assert main([*RUN, "--model.beta", "0.3", "--model.optim.lr", "0.7"]) == 0
    (run,) = all_runs(workdir)
    return checkpoint_of(folder_of(workdir, run))


def test_flags_win_over_the_checkpoint_and_are_printed(
    workdir: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main([*RUN, "--trainer.max_steps=5", "--ckpt_path", str(trained), "--model.beta", "0.9"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("model.")]
    assert lines == ["model.beta: 0.9 is used; the checkpoint has 0.3"]
    _, run = all_runs(workdir)
    assert config_of(workdir, run)["model"]["init_args"]["beta"] == 0.9
    # Nobody spoke of lr: the checkpoint's value, not the class's default.
    assert config_of(workdir, run)["model"]["init_args"]["optim"]["lr"] == 0.7
    saved = load_checkpoint_folder(checkpoint_of(folder_of(workdir, run)))
    assert saved["hyper_parameters"]["beta"] == 0.9
    # Four steps down by 0.1 * 0.3, then one by 0.1 * 0.9.
    assert saved["state_dict"]["weight"].item() == pytest.approx(-(4 * 0.03 + 0.09), abs=1e-6)


def test_files_win_over_the_checkpoint_too(workdir: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("model: {init_args: {optim: {lr: 0.5}}}\n")
    assert main([*RUN, "-c", "run.yaml", "--trainer.max_steps=5", "--ckpt_path", str(trained)]) == 0
    assert "model.optim.lr: 0.5 is used; the checkpoint has 0.7" in capsys.readouterr().out
    _, run = all_runs(workdir)
    assert config_of(workdir, run)["model"]["init_args"]["beta"] == 0.3


def test_the_same_with_dpo(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dpo = ["fit", "-c", str(CONFIGS / "dpo.yaml"), "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "1"]
    assert main([*dpo, *QUIET, "--model.beta", "0.3", "--trainer.max_steps", "1"]) == 0
    (run,) = all_runs(workdir)
    start = str(checkpoint_of(folder_of(workdir, run)))
    capsys.readouterr()
    assert main([*dpo, *QUIET, "--ckpt_path", start, "--model.beta", "0.9", "--trainer.max_steps", "2"]) == 0
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith("model.")] == [
        "model.beta: 0.9 is used; the checkpoint has 0.3"
    ]
    _, again = all_runs(workdir)
    saved = load_checkpoint_folder(checkpoint_of(folder_of(workdir, again)))
    assert (saved["hyper_parameters"]["beta"], saved["global_step"]) == (0.9, 2)


def test_settings_that_a_base_class_takes_come_from_the_checkpoint_too(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`entropy` and `completions` are among GRPO's `**settings`; the file speaks of the second only. Its scale, a pair
    there and a list in the checkpoint, is the same."""
    grpo = ["fit", "-c", str(CONFIGS / "debug" / "grpo_smoke.yaml"), *QUIET, "--data.max_rows", "8"]
    grpo += ["--model.rewards.short", "{reward: LengthWithin, args: {maximum: 9}, scale: [0, 1]}"]
    assert (
        main([*grpo, "--model.entropy.coefficient", "0.01", "--model.completions", "3", "--trainer.max_steps", "1"])
        == 0
    )
    (run,) = all_runs(workdir)
    start = str(checkpoint_of(folder_of(workdir, run)))
    capsys.readouterr()
    assert main([*grpo, "--ckpt_path", start, "--trainer.max_steps", "2", "--trainer.max_epochs", "2"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model.")]
    assert told == ["model.completions: 4 is used; the checkpoint has 3"]
    _, again = all_runs(workdir)
    used = config_of(workdir, again)["model"]["init_args"]
    assert (used["entropy"]["coefficient"], used["completions"]) == (0.01, 4)


@pytest.mark.parametrize("place", ["nowhere", "http://127.0.0.1/a.ckpt", "plain.ckpt"])
def test_a_checkpoint_that_cannot_be_used_is_one_line(
    workdir: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    Path("plain.ckpt").write_bytes(b"a pickle, perhaps")
    assert main([*RUN, "--ckpt_path", place]) == 2
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("alignment: error:")]
    assert len(errors) == 1
    assert place in errors[0]


def test_last_takes_the_newest_run_of_the_same_name_and_class(workdir: Path) -> None:
    one, two = (["--trainer.logger.run_name", name] for name in ("one", "two"))
    assert main([*RUN, *one]) == 0
    assert main([*RUN, *two]) == 0
    assert main([*RUN, *one, "--trainer.max_steps", "6", "--ckpt_path", "last"]) == 0
    ids = {r.data.tags["mlflow.runName"]: r.info.run_id for r in all_runs(workdir)}
    assert steps_of(workdir, ids["one"]) == [0, 1, 2, 3, 4, 5]
    assert steps_of(workdir, ids["two"]) == [0, 1, 2, 3]
    given = ["--trainer.logger.run_id", ids["two"]]
    assert main([*RUN, *given, "--trainer.max_steps", "5", "--ckpt_path", "last"]) == 0
    assert steps_of(workdir, ids["two"]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["last", "best"])
def test_nothing_to_resume_is_one_line(workdir: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([*RUN, "--ckpt_path", name]) == 2
    assert f"ckpt_path={name}: no run of experiment 'alignment'" in capsys.readouterr().err
    assert main([*RUN, "--trainer.logger", "false", "--ckpt_path", name]) == 2
    assert "give the folder" in capsys.readouterr().err


def test_best_is_the_monitored_one(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = '[{"class_path": "callbacks.Checkpoint", "init_args": {"monitor": "val/loss", "mode": "max"}}]'
    assert main([*RUN, "--trainer.max_steps=8", "--trainer.callbacks", monitor]) == 0
    capsys.readouterr()
    assert main(["validate", *TOYS, "--ckpt_path", "best"]) == 0
    # val/loss is beta * weight and the weight only falls: the end of the first epoch is the best under mode max.
    assert "step=4" in capsys.readouterr().out
    (run,) = all_runs(workdir)
    assert config_of(workdir, run, "validate-1.yaml")["ckpt_path"].endswith("step=4.ckpt")


def test_an_evaluated_run_is_not_the_newest(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of two runs is evaluated, as is a fresh module: `last` is the second run's all the same."""
    for _ in range(2):
        assert main(RUN) == 0
    first, second = all_runs(workdir)
    assert main(["validate", *TOYS, "--ckpt_path", "last", "--trainer.logger.run_id", first.info.run_id]) == 0
    assert main(["validate", *TOYS]) == 0
    capsys.readouterr()
    assert main(["validate", *TOYS, "--ckpt_path", "last"]) == 0
    out = capsys.readouterr().out
    assert f"evaluating run {second.info.run_id} from" in out
    assert "newer runs" not in out
    again = {run.info.run_id: run for run in all_runs(workdir)}[first.info.run_id]
    assert "resumes" not in again.data.tags
    assert again.info.end_time == first.info.end_time


def test_an_evaluation_stands_beside_the_training_it_looks_at(workdir: Path) -> None:
    """Metrics at the checkpoint's step; what the run drew and sampled stays as it was."""
    config = str(CONFIGS / "debug" / "decoupled_po_smoke.yaml")
    assert main(["fit", "-c", config, "--trainer.val_check_interval=1"]) == 0
    (folder,) = {path.parent for path in workdir.rglob("run.json")}
    before = {name: (folder / name).read_bytes() for name in ("samples.jsonl", "rewards.png")}
    trained = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for command in ("validate", "test"):
        assert main([command, "-c", config, "--ckpt_path=last"]) == 0
    assert {name: (folder / name).read_bytes() for name in before} == before
    added = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][len(trained) :]
    last = max(row["step"] for row in trained)
    steps = {row["step"] for row in added if any(name.startswith(("val/", "test/")) for name in row)}
    assert steps == {last + 1}  # as many updates as were made; Lightning's own validation counts before the last one
    for name in ("validate", "test"):
        rows = [json.loads(line) for line in (folder / f"{name}_samples.jsonl").read_text().splitlines()]
        assert {row["step"] for row in rows} == {last + 1}
        assert (folder / f"{name}_rewards.png").is_file()


NEVER = '[{"class_path": "callbacks.Checkpoint", "init_args": {"monitor": "val/reward", "mode": "max"}}]'


@pytest.mark.filterwarnings("ignore:Checkpoint monitors 'val/reward'")
def test_no_best_checkpoint_says_why(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN[:-1], "--trainer.callbacks", NEVER]) == 0
    (run,) = all_runs(workdir)
    assert main(["validate", *TOYS, "--ckpt_path", "best"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"alignment: error: run {run.info.run_id} tests.cli_toys.ToyModule: no best checkpoint in ")
    assert line.endswith("checkpoints: val/reward was never logged; use last")
    assert main(["export", "best", "out"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("val/reward was never logged; use last")


def test_an_evaluation_without_the_callbacks_of_training(workdir: Path) -> None:
    """Has no use for their state, so not a word of it; a run that goes on without them does."""
    assert main(RUN) == 0
    without = [*TOYS, "--trainer.max_steps", "5", "--trainer.log_every_n_steps", "1", "--ckpt_path", "last"]
    said = "callbacks used to create the checkpoint need to be provided"
    for words, expected in ((["validate", *TOYS, "--ckpt_path", "last"], False), (["fit", *without], True)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert main(words) == 0
        assert any(said in str(warning.message) for warning in seen) is expected


# ---------------------------------------------------------------------- two processes


@pytest.mark.slow
def test_two_processes_record_one_run(workdir: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    two = ["--trainer", str(CONFIGS / "trainer" / "ddp2.yaml")]
    command = [sys.executable, "-m", "alignment", "fit", "-c", "run.yaml", *two]
    Path("run.yaml").write_text(
        "model: {class_path: tests.cli_toys.ToyModule}\n"
        "data: {class_path: tests.cli_toys.ToyData, init_args: {path: here}}\n"
        "trainer: {max_steps: 4, log_every_n_steps: 1, enable_progress_bar: false}\n"
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = all_runs(workdir)
    assert run.info.status == "FINISHED"
    assert [p.name for p in (workdir / "runs" / "alignment").iterdir()] == [run.info.run_id]
    assert steps_of(workdir, run.info.run_id) == [0, 1, 2, 3]
    assert checkpoint_of(folder_of(workdir, run)).is_dir()
    assert config_of(workdir, run)["trainer"]["devices"] == 2


# ---------------------------------------------------------------------- the shipped files


def with_rewards() -> None:
    """For what needs the extra `rewards`."""
    for package in ("rank_bm25", "vaderSentiment", "better_profanity"):
        pytest.importorskip(package)


@pytest.mark.parametrize("config", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_every_complete_config_runs(workdir: Path, config: str) -> None:
    """Fit for two batches on the tiny policy, as written."""
    if config == "code_generation.yaml":
        pytest.importorskip("flake8")
        need_sandbox()
    if config == "customer_support.yaml":
        with_rewards()
    if config == "modpo.yaml":  # the built-in pairs have no column for it
        pair = {"chosen": "Three years.", "rejected": "That is a question that quite a lot of people ask."}
        rows = [{"prompt": f"Question {i}?", **pair, "brevity": 0.7} for i in range(40)]
        Path("my_pairs_with_margin.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["-c", str(CONFIGS / config), "-c", str(CONFIGS / "debug" / "fast.yaml")]
    assert main(["fit", *files, "--trainer", str(CONFIGS / "trainer" / "cpu.yaml"), *QUIET]) == 0


@pytest.mark.parametrize("config", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_predictions_of_every_complete_config_are_written(config: str) -> None:
    named = yaml.safe_load((CONFIGS / config).read_text())["trainer"]["callbacks"]
    assert "callbacks.Predictions" in [callback["class_path"] for callback in named]
    assert len((CONFIGS / config).read_text().splitlines()) <= 40


@pytest.mark.parametrize("overlay", sorted(p.name for p in (CONFIGS / "debug").glob("*.yaml")))
def test_every_debug_overlay_runs(workdir: Path, overlay: str) -> None:
    """Upon the DPO configuration, two batches long."""
    if overlay == "code_generation_smoke.yaml":
        pytest.importorskip("flake8")
        need_sandbox()
    if overlay == "customer_support_smoke.yaml":
        with_rewards()
    words = ["-c", str(CONFIGS / "dpo.yaml"), "-c", str(CONFIGS / "debug" / overlay), "--trainer.fast_dev_run", "2"]
    assert main(["fit", *words, "--trainer.accelerator", "cpu", *QUIET]) == 0
