"""`alignment tune`: spaces, what trials are told, pruning, going on, populations, and what is left at the end.

Runs are played by a script that logs made-up metrics; one test runs `alignment fit` itself.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.cli import main
from alignment.errors import UserError
from alignment.tuning import population, process
from alignment.tuning.plan import Plan, as_word, wanted
from alignment.tuning.population import Member, explore, select
from alignment.tuning.process import FitProcess, RunFailed
from alignment.tuning.space import Choices, Range, overlay, read, value_of

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "model": {"class_path": "modules.DPO", "init_args": {"beta": 0.1, "optim": {"lr": 1e-3}, "loss": "sigmoid"}},
    "data": {"class_path": "datamodules.PreferenceData", "init_args": {"batch_size": 32}},
    "trainer": {
        "logger": {
            "class_path": "alignment.tracking.TrackingLogger",
            "init_args": {"root": ".", "experiment_name": "alignment", "tags": None, "tracking_uri": None},
        }
    },
}
PLAYER = """
import json, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
if "--print_config" in sys.argv:
    print(open("config.json").read()); sys.exit()
name, beta = flags["trainer.logger.run_name"], float(flags["model.beta"])
folder = pathlib.Path("runs/alignment") / name
folder.mkdir(parents=True)
(folder / "run.json").write_text(json.dumps({"run_name": name, "started": 1.0, "flags": flags}))
if beta > 0.9:
    print("alignment: error: beta is too large"); sys.exit(2)
with open(folder / "metrics.jsonl", "w") as file:
    for step in (1, 2, 3):
        row = {"step": step, "val/loss": (beta - 0.3) ** 2 + 1 / step, "val/length": beta}
        file.write(json.dumps(row) + "\\n"); file.flush()
        time.sleep(float(flags.get("trainer.pause", 0)))
"""


@pytest.fixture
def played(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Path("player.py").write_text(PLAYER)
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("space.yaml").write_text("model.beta: {low: 0.1, high: 0.8}\nmodel.optim.lr: {around: 0.2}\n")
    monkeypatch.setattr(process, "FIT", (sys.executable, "player.py"))
    monkeypatch.setattr(process, "POLL_SECONDS", 0.02)
    return workdir


def tune(*words: str) -> int:
    return main(["tune", "-c", "base.yaml", "--space", "space.yaml", *words])


def records() -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(Path("runs/alignment").glob("*/run.json"))]


# ------------------------------------------------------------------------------------------------ spaces


def space(text: str) -> dict[str, Any]:
    Path("s.yaml").write_text(text)
    return read([Path("s.yaml")], CONFIG)


def test_a_space(workdir: Path) -> None:
    found = space("model.beta: {around: 0.2}\nmodel.optim.lr: {low: 1.0e-4, high: 1.0e-2, log: true}\n"
                  "data.batch_size: {choices: [16, 32]}\n")  # fmt: skip
    assert found["model.beta"] == Range(low=pytest.approx(0.08), high=pytest.approx(0.12))
    assert found["model.optim.lr"] == Range(low=1e-4, high=1e-2, log=True)
    assert found["data.batch_size"] == Choices(values=(16, 32))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model.bta: {around: 0.2}", "no setting 'model.bta'; did you mean 'model.beta'?"),
        ("model.beta: 3", "model.beta is 3; give"),
        ("model.beta: {low: 2, high: 1}", "low must be below high"),
        ("model.beta: {low: 0, high: 1, log: true}", "above 0 with log"),
        ("model.beta: {choices: [1]}", "two or more"),
        ("model.loss: {around: 0.2}", "around is for positive numbers, and the configuration has 'sigmoid'"),
        ("[1]", "is no space"),
        ("{", "is not YAML"),
        ("{}", "no settings to search"),
    ],
)
def test_mistakes_in_a_space(workdir: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        space(text)


def test_whole_numbers_stay_whole() -> None:
    batch = Range(low=8, high=64)
    assert batch.within(10.4) == 10
    assert isinstance(batch.within(10.4), int)
    assert all(isinstance(batch.draw(random.Random(i)), int) for i in range(5))
    assert not Range(low=8.0, high=64).whole


def test_an_overlay_has_classes_where_the_configuration_has() -> None:
    assert overlay(CONFIG, {"model.optim.lr": 2.0, "data.batch_size": 8, "trainer.logger.root": "x"}) == {
        "model": {"init_args": {"optim": {"lr": 2.0}}},
        "data": {"init_args": {"batch_size": 8}},
        "trainer": {"logger": {"init_args": {"root": "x"}}},
    }
    assert value_of(CONFIG, "trainer.logger.root", "here") == "."


def test_words() -> None:
    """The command line reads YAML, where 1e-05 is text."""
    for value in (1e-05, 0.1, 3, "a", True, None):
        assert yaml.safe_load(as_word(value)) == value


# ------------------------------------------------------------------------------------------------ searching


def test_a_search(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    assert tune("--objective=val/loss=min", "--trials=6", "--no_prune", "--data.max_rows=8") == 0
    said = capsys.readouterr().out
    assert "alignment fit -c base.yaml -c tuning/study/best.yaml" in said
    runs = records()
    assert len(runs) == 6
    betas = [float(run["flags"]["model.beta"]) for run in runs]
    assert all(0.1 <= beta <= 0.8 for beta in betas)
    assert all(0.0008 <= float(run["flags"]["model.optim.lr"]) <= 0.0012 for run in runs)
    assert all(run["flags"]["data.max_rows"] == "8" for run in runs)  # what is not ours goes to the runs
    best = yaml.safe_load(Path("tuning/study/best.yaml").read_text())
    assert best["model"]["init_args"]["beta"] == min(betas, key=lambda beta: (beta - 0.3) ** 2)
    assert Path("tuning/study/importance.png").stat().st_size > 1000
    parent = Path("tuning/study/mlflow_run").read_text().strip()
    assert all(json.loads(run["flags"]["trainer.logger.tags"])["mlflow.parentRunId"] == parent for run in runs)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{played.resolve()}/mlflow.db")
    assert client.get_run(parent).info.status == "FINISHED"
    assert "best.yaml" in [file.path for file in client.list_artifacts(parent)]


def test_a_study_goes_on(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    assert tune("--objective=val/loss=min", "--trials=2") == 0
    assert tune("--objective=val/loss=min", "--trials=3") == 0
    assert "study study goes on after 2 trials" in capsys.readouterr().out
    assert len(records()) == 3
    assert tune("--objective=val/loss=max", "--trials=3") == 2
    assert "give another --name or --out" in capsys.readouterr().err


def test_failed_runs_are_told_and_not_counted(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    Path("space.yaml").write_text("model.beta: {choices: [0.2, 0.95]}")
    assert tune("--objective=val/loss=min", "--trials=3") == 0
    said = capsys.readouterr().out
    betas = [float(run["flags"]["model.beta"]) for run in records()]
    assert betas.count(0.2) == 3
    assert said.count("alignment: error: beta is too large") == betas.count(0.95)
    Path("space.yaml").write_text("model.beta: {choices: [0.95, 0.96]}")
    assert tune("--objective=val/loss=min", "--trials=1", "--name=hopeless") == 2
    assert "no trial of study hopeless was finished" in capsys.readouterr().err


def test_hopeless_trials_end_early(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After five trials whose loss falls, one that is worse than their median at a step is pruned there."""
    pytest.importorskip("optuna")
    Path("space.yaml").write_text("model.beta: {choices: [0.3, 0.31, 0.8]}")
    assert tune("--objective=val/loss=min", "--trials=14", "--trainer.pause=0.05") == 0
    said = capsys.readouterr().out
    assert "pruned at step" in said
    states = {row["state"] for row in json.loads(Path("tuning/study/trials.json").read_text())}
    assert states == {"complete", "pruned"}


def test_several_objectives(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loss is least at 0.3 and length grows with beta: nothing below 0.3 is on the front."""
    pytest.importorskip("optuna")
    assert tune("--objective=val/loss=min", "--objective=val/length=max", "--trials=6", "--jobs=2") == 0
    betas = sorted(float(run["flags"]["model.beta"]) for run in records())
    fragments = sorted(Path("tuning/study").glob("pareto_*.yaml"))
    front = sorted(yaml.safe_load(f.read_text())["model"]["init_args"]["beta"] for f in fragments)
    assert front == sorted(
        b for b in betas if not any(o > b and (o - 0.3) ** 2 <= (b - 0.3) ** 2 for o in betas)
    )
    assert Path("tuning/study/pareto.png").is_file()
    assert capsys.readouterr().out.count("best: trial") == len(front)


def test_mistakes(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")

    def line(*words: str) -> str:
        assert tune(*words) == 2
        return capsys.readouterr().err

    assert "has not logged 'val/los'; it logged val/length, val/loss" in line("--objective=val/los=min", "--trials=2")
    assert "METRIC=max or METRIC=min" in line("--objective=val/loss")
    assert "--trials is 0" in line("--objective=val/loss=min", "--trials=0")
    assert "takes two runs at least" in line("--objective=val/loss=min", "--population=1")
    both = ["--objective=val/loss=min", "--objective=val/length=max", "--population=4"]
    assert "a population has one objective" in line(*both)


def test_a_search_of_real_runs(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    tiny = ["--data.max_rows=8", "--data.max_eval_rows=4", "--data.batch_size=4", "--trainer.max_epochs=1"]
    config, beta = REPOSITORY / "configs" / "dpo.yaml", REPOSITORY / "configs" / "tune" / "beta.yaml"
    words = ["tune", "-c", str(config), "--space", str(beta), "--objective=val/loss=min", "--trials=2", *tiny]
    assert main([*words, "--trainer.accelerator=cpu"]) == 0
    said = capsys.readouterr().out
    assert "trial 1: val/loss 0." in said
    assert main(["fit", "-c", str(config), "-c", "tuning/study/best.yaml", *tiny, "--trainer.fast_dev_run=1"]) == 0
    parent = Path("tuning/study/mlflow_run").read_text().strip()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{workdir.resolve()}/mlflow.db")
    number = client.get_run(parent).info.experiment_id
    nested = client.search_runs([number], filter_string=f"tags.`mlflow.parentRunId` = '{parent}'")
    assert sorted(run.info.run_name for run in nested) == ["study-0", "study-1"]


def test_a_run_that_is_asked_to_end(played: Path) -> None:
    stopping = threading.Event()
    words = ["--model.beta=0.2", "--trainer.pause=30"]
    run = FitProcess(words, name="long", root=Path("."), log=Path("log"), stopping=stopping)
    rows = run.rows()
    assert next(rows)[0] == 1
    stopping.set()
    with pytest.raises(process.Stopped):
        list(rows)


# ------------------------------------------------------------------------------------------------ populations

SPACE = {"model.beta": Range(low=0.1, high=1.0), "data.batch_size": Choices(values=(8, 16, 32))}


def test_exploring() -> None:
    """Each number times 0.8 or 1.25 and within its range, each choice one step along the list."""
    for seed in range(20):
        found = explore({"model.beta": 0.5, "data.batch_size": 8}, SPACE, random.Random(seed))
        assert found["model.beta"] in (pytest.approx(0.4), pytest.approx(0.625))
        assert found["data.batch_size"] in (8, 16)
        assert explore({"model.beta": 0.11, "data.batch_size": 8}, SPACE, random.Random(seed))["model.beta"] >= 0.1


def members(scores: Sequence[float | None]) -> list[Member]:
    return [
        Member(values={"model.beta": 0.5, "data.batch_size": 16}, score=score, checkpoint=str(i))
        for i, score in enumerate(scores)
    ]


@pytest.mark.parametrize(("mode", "replaced", "by"), [("max", 2, "1"), ("min", 1, "2")])
def test_selection(mode: str, replaced: int, by: str) -> None:
    """Of four, the worst one goes on from the best one's checkpoint, with its values moved."""
    found = select(members([0.5, 0.9, 0.1, 0.6]), SPACE, mode, random.Random(0))
    assert [m.checkpoint for m in found] == [by if i == replaced else str(i) for i in range(4)]
    assert found[replaced].values["model.beta"] in (pytest.approx(0.4), pytest.approx(0.625))
    assert [m.values["model.beta"] for i, m in enumerate(found) if i != replaced] == [0.5] * 3


def test_failed_runs_are_replaced_first() -> None:
    found = select(members([None, 0.9, None, 0.6]), SPACE, "max", random.Random(0))
    assert [m.checkpoint for m in found] == ["1", "1", "1", "3"]
    with pytest.raises(RunFailed, match="every run"):
        select(members([None, None]), SPACE, "max", random.Random(0))


def test_a_population(played: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts are told where to start and how long to train; the study goes on after a whole round."""
    monkeypatch.setattr(FitProcess, "checkpoint", lambda self: Path("state") / self.name)
    Path("space.yaml").write_text("model.beta: {low: 0.1, high: 0.8}")
    words = ["--objective=val/loss=min", "--population=4", "--interval=10", "--jobs=2"]
    assert tune(*words, "--rounds=1") == 0
    assert tune(*words, "--rounds=2") == 0
    assert "best: " in capsys.readouterr().out
    runs = {run["run_name"]: run["flags"] for run in records()}
    assert sorted(runs) == [f"study-{i}-{part}" for i in range(4) for part in range(2)]
    assert all(flags["trainer.limit_train_batches"] == "10" for flags in runs.values())
    assert [runs[f"study-0-{part}"]["trainer.max_epochs"] for part in range(2)] == ["1", "2"]
    assert "ckpt_path" not in runs["study-0-0"]
    score = {i: (float(runs[f"study-{i}-0"]["model.beta"]) - 0.3) ** 2 for i in range(4)}
    best, worst = min(score, key=score.__getitem__), max(score, key=score.__getitem__)
    for i in range(4):
        assert runs[f"study-{i}-1"]["ckpt_path"] == f"state/study-{best if i == worst else i}-0"
    schedule = json.loads(Path("tuning/study/schedule.json").read_text())
    assert [part["from_batch"] for part in schedule] == [0, 10]
    assert Path("tuning/study/schedule.png").is_file()
    assert tune(*words[:1], "--population=4", "--interval=20", "--rounds=3") == 2
    assert "is of another population" in capsys.readouterr().err


def test_a_population_of_real_runs(workdir: Path) -> None:
    """Two members, two parts: the second part of each continues a state of the first."""
    Path("space.yaml").write_text("model.beta: {low: 0.05, high: 0.5, log: true}")
    small = ["--data.max_rows=24", "--data.max_eval_rows=4", "--data.batch_size=4", "--trainer.accelerator=cpu"]
    words = ["tune", "-c", str(REPOSITORY / "configs" / "dpo.yaml"), "--space", "space.yaml", *small]
    assert main([*words, "--objective=val/loss=min", "--population=2", "--interval=2", "--rounds=2"]) == 0
    state = json.loads(Path("tuning/study/population.json").read_text())
    assert [len(member["history"]) for member in state["members"]] == [2, 2]
    (second,) = {Path(member["checkpoint"]).parents[1] for member in state["members"][:1]}
    steps = [json.loads(line)["step"] for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3  # the fourth, counted from 0


def test_wanted() -> None:
    assert wanted({"a": 1.0, "b": 2.0}, {"b": "max", "a": "min"}, "run") == [2.0, 1.0]


def test_the_logger_must_be_ours() -> None:
    other = {**CONFIG, "trainer": {"logger": False}}
    with pytest.raises(UserError, match=r"trainer\.logger must be alignment\.tracking\.TrackingLogger"):
        Plan(name="n", words=[], config=other, space={}, objectives={"a": "max"}, folder=Path("x"))


def test_the_population_is_drawn_from_the_space() -> None:
    plan = Plan(name="n", words=[], config=CONFIG, space=SPACE, objectives={"a": "max"}, folder=Path("x"))
    drawn = population.first(plan, 4)
    assert drawn == population.first(plan, 4)
    assert len({m.values["model.beta"] for m in drawn}) == 4
