"""Difficulty by a model's own answers: rates by hand, abstentions, resuming, and what PromptData makes of it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from alignment.augmentation import grading
from alignment.augmentation.generation import Generator
from alignment.augmentation.grading import GradedRows, Grader, GradingConfig
from alignment.augmentation.journal import Graded, Journal
from alignment.augmentation.rows import read_rows
from alignment.augmentation.settings import take
from alignment.checkpoint_folder import write_checkpoint
from alignment.cli import main
from alignment.errors import UserError
from alignment.export import export
from alignment.policy import PolicyConfig
from alignment.ready import ready
from alignment.rewards import Condition, RewardSpec
from alignment.rollout import Rollout, SamplingConfig
from alignment.tiny import save_tiny, tiny_tokenizer
from datamodules import PromptData, StrataConfig
from modules import SFT
from tests.unit.test_augment import lines, written

SAMPLING = SamplingConfig(max_tokens=4)


def scripted(completions: list[str], script: list[Any]) -> list[Any]:
    """What the row says about each of its four answers, in their order."""
    return [values[i % 4] for i, values in enumerate(script)]


def even(completion: str) -> float:
    """Of the text alone."""
    return float(len(completion) % 2 == 0)


def here(reward: Any = scripted, **settings: Any) -> RewardSpec:
    return RewardSpec(reward=reward, in_process=True, **settings)


SCRIPTS: list[list[Any]] = [[1, 1, 1, 0], [1, None, 0, 1], [0, 0, None, None], [None] * 4]
SCRIPTS += [[0.5, 0.25, 0, 1], [1, "x", 1, 1]]


def rows_of(scripts: Sequence[list[Any]] = SCRIPTS) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {i}?", "script": script} for i, script in enumerate(scripts)]


def graded(folder: Path, rows: Sequence[Any], reward: Any = None, **settings: Any) -> GradedRows:
    source = read_rows(str(written(folder / "rows.jsonl", rows)), prompts_first=True)
    grader = Grader(source, GradingConfig(samples=4, **settings), {"right": reward or here()}, SAMPLING)
    made, journal = grader.grade(ready("tiny", policy={}), folder / "journal.jsonl")
    journal.close()
    return made


# ---------------------------------------------------------------------- rates


def test_rates_by_hand(tmp_path: Path) -> None:
    """3 of 4; 2 of the 3 with a value; 0 of 2; none; 1.75 of 4; 3 of 3, as text is no number but a fault."""
    made = graded(tmp_path, rows_of())
    assert [(row["success_rate"], row["success_trials"], row["difficulty"]) for row in made.rows] == [
        (0.75, 4, "easy"),
        (0.666667, 3, "medium"),
        (0.0, 2, "hard"),
        (None, 0, None),
        (0.4375, 4, "medium"),
        (1.0, 3, "easy"),
    ]
    assert made.counts == {
        "prompts graded": 6,
        "of them by an earlier start": 0,
        "answers": 24,
        "answers with a value": 16,
        "answers abstained from": 7,
        "answers lost to faults": 1,
        "rows easy": 2,
        "rows medium": 2,
        "rows hard": 1,
        "rows without a difficulty": 1,
    }
    assert made.rates["mean success rate"] == pytest.approx((0.75 + 0.666667 + 0 + 0.4375 + 1) / 5)
    assert [row["script"] for row in made.rows] == SCRIPTS


def test_a_bound_belongs_to_the_easier_side() -> None:
    config = GradingConfig()
    rates = {1.0: "easy", 0.7: "easy", 0.69: "medium", 0.3: "medium", 0.29: "hard", 0.0: "hard"}
    assert {rate: config.name_of(rate) for rate in rates} == rates
    assert GradingConfig(rates=[0.9, 0.5]).name_of(0.7) == "medium"


def test_difficulty_as_a_number(tmp_path: Path) -> None:
    made = graded(tmp_path, rows_of(), difficulty="number", column="hardness")
    assert [row["hardness"] for row in made.rows] == [0.25, 0.333333, 1.0, None, 0.5625, 0.0]
    assert "difficulty" not in made.rows[0]


def test_rows_that_are_one_task_are_graded_once(tmp_path: Path) -> None:
    """The same prompt with another column is another task."""
    rows = [{"prompt": "Q?", "script": [value] * 4} for value in (1, 0, 1)]
    made = graded(tmp_path, rows)
    assert [row["success_rate"] for row in made.rows] == [1.0, 0.0, 1.0]
    assert made.counts["prompts graded"] == 2


def test_conditions_count_and_other_rewards_are_not_asked(tmp_path: Path) -> None:
    """Success counts where `even` reaches 2, which is never; `broken` would fail."""
    rewards = {
        "broken": here("tests.nowhere.reward"),
        "right": here(condition=Condition(reward="even", at_least=2.0)),
        "even": here(even),
    }
    source = read_rows(str(written(tmp_path / "rows.jsonl", rows_of([[1] * 4] * 2))), prompts_first=True)
    grader = Grader(source, GradingConfig(samples=4, success="right"), rewards, SAMPLING)
    made, _ = grader.grade(ready("tiny", policy={}), tmp_path / "journal.jsonl")
    assert [row["success_rate"] for row in made.rows] == [0.0, 0.0]


def test_a_value_outside_of_0_to_1_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward 'right' gave 3; success lies in \[0, 1\]: give it a scale"):
        graded(tmp_path, rows_of([[3] * 4]))
    assert graded(tmp_path, rows_of([[3] * 4]), here(scale=(0.0, 4.0))).rows[0]["success_rate"] == 0.75


def test_nothing_that_could_be_graded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no prompt of .* could be graded: reward 'right' gave no value \(4 faults\)"):
        graded(tmp_path, rows_of([["x"] * 4]))


def test_a_prompt_that_has_no_room_has_no_difficulty(tmp_path: Path) -> None:
    """The tiny model has 2048 positions."""
    rows = [*rows_of([[1] * 4]), {"prompt": "é" * 3000, "script": [1] * 4}]
    made = graded(tmp_path, rows, max_prompt_tokens=None)
    assert [row["difficulty"] for row in made.rows] == ["easy", None]
    assert made.counts["prompts too long for the model"] == 1
    assert graded(tmp_path, rows).counts["prompts graded"] == 2  # cut as in training


# ---------------------------------------------------------------------- training


def test_prompt_data_mixes_by_it(tmp_path: Path) -> None:
    scripts = [[1] * 4] * 3 + [[1, 1, 0, 0]] * 2 + [[0] * 4] + [[None] * 4]
    made = graded(tmp_path, rows_of(scripts))
    out = written(tmp_path / "graded.jsonl", made.rows)
    settings: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "cache_dir": None, "val_fraction": 0.0}
    data = PromptData(str(out), strata=StrataConfig(), **settings)
    found = [group.columns["difficulty"] for group in data.groups("train")]
    assert found == ["easy"] * 3 + ["medium"] * 2 + ["hard"]
    assert data.report.strata == {"easy": 3, "medium": 2, "hard": 1}
    assert {reason: tally.count for reason, tally in data.report.dropped.items()} == {"difficulty is None": 1}


def test_an_empty_stratum_is_told(tmp_path: Path) -> None:
    (note,) = graded(tmp_path, rows_of([[0] * 4, [1] * 4])).notes
    assert note.startswith("no row is medium: training mixes all three, so give --data.strata.ratio with medium: 0")


# ---------------------------------------------------------------------- resuming


def test_a_stopped_grading_goes_on_where_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "AT_ONCE", 2)
    rows = [{"prompt": f"Question {i}?"} for i in range(5)]
    whole = graded(tmp_path, rows, here(even))
    sample, asked = Generator.sample, list[list[int]]()

    def watched(self: Generator, prompts: Any, *rest: Any, **settings: Any) -> Rollout:
        asked.append([prompt.index for prompt in prompts])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return sample(self, prompts, *rest, **settings)

    monkeypatch.setattr(Generator, "sample", watched)
    with pytest.raises(KeyboardInterrupt):
        graded(tmp_path, rows, here(even))
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"grades": [[3, 1.0')  # a line that a crash cut off
    resumed = graded(tmp_path, rows, here(even))
    assert asked == [[1, 2], [3, 4], [3, 4], [5]]
    assert resumed.rows == whole.rows
    assert resumed.counts["of them by an earlier start"] == 2
    assert {**resumed.counts, "of them by an earlier start": 0} == whole.counts
    assert not (tmp_path / "journal.jsonl").exists()


def test_a_journal_of_another_grading_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path, {"seed": 0, "model": "a"})
    first.add({1: Graded(2.0, 4)}, 3)
    again = Journal(path, {"seed": 0, "model": "a"})
    assert (again.grades, again.faults) == ({1: Graded(2.0, 4)}, 3)
    with pytest.raises(UserError, match="is of a grading with another seed; give the same again to go on, or delete"):
        Journal(path, {"seed": 1, "model": "a"})
    path.write_text("[]\n")
    with pytest.raises(UserError, match="is no journal of a grading"):
        Journal(path, {"seed": 0})


def test_a_journal_on_a_full_disk_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "journal.jsonl"
    Journal(path, {"seed": 0}).add({1: Graded(2.0, 4)}, 0)
    with monkeypatch.context() as patch:
        patch.setattr("alignment.augmentation.journal.os.fsync", full)
        with pytest.raises(UserError, match="cannot be written: No space left on device; mend that and give the same"):
            Journal(path, {"seed": 0}).add({2: Graded(1.0, 4)}, 0)
    assert Journal(path, {"seed": 0}).grades[1] == Graded(2.0, 4)


def test_a_journal_without_a_whole_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"seed": ')
    journal = Journal(path, {"seed": 0})
    assert journal.grades == {}
    assert not path.exists()


# ---------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model, prompts, and a reward of the user's own, that reads the answer's text alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_tiny(tmp_path / "mine")
    (tmp_path / "own_rewards.py").write_text("def even(completion):\n    return float(len(completion) % 2 == 0)\n")
    written(tmp_path / "rows.jsonl", [{"prompt": f"Question {i}?", "answer": str(i)} for i in range(4)])
    return tmp_path


GRADE = ["data", "augment", "rows.jsonl", "out.jsonl", "--mode=grade", "--no_tracking", "--sampling.max_tokens=4"]
DETAILED = "{reward: own_rewards.even, in_process: true}"


def test_a_reward_in_a_worker_and_the_settings_of_a_run(folder: Path) -> None:
    """A file's reward and policy, and a flag over them; a fresh process would write the same bytes."""
    model = {"policy": {"name": "mine"}, "rewards": {"even": {"reward": "own_rewards.even"}}, "optim": {"lr": 1.0}}
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": {"class_path": "modules.GRPO", "init_args": model}}))
    assert main([*GRADE, "-c", "run.yaml", "--samples=3"]) == 0
    rows = lines(folder / "out.jsonl")
    assert [row["success_trials"] for row in rows] == [3] * 4
    assert all(row["success_rate"] in (0.0, 0.333333, 0.666667, 1.0) for row in rows)
    assert not list(folder.glob(".out*"))
    first = (folder / "out.jsonl").read_bytes()
    words = ["--model=mine", "--rewards.even", "own_rewards.even", "--samples=3", "--force"]
    assert main([*GRADE, *words]) == 0
    assert (folder / "out.jsonl").read_bytes() == first


def test_dotted_flags_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("rewards: {a: ExactMatch, b: {reward: Format, args: {pattern: x}}}\nsampling: {top_k: 5}\n")
    flags = ["--rewards.a.timeout_s", "5", "--sampling.max_tokens=8"]
    found, rest = take(["in", "-c", str(file), *flags, "out", "--seed", "3"])
    assert rest == ["in", "out", "--seed", "3"]
    assert found["rewards"] == {
        "a": {"reward": "ExactMatch", "timeout_s": 5},
        "b": {"reward": "Format", "args": {"pattern": "x"}},
    }
    assert found["sampling"] == {"top_k": 5, "max_tokens": 8}
    replaced, _ = take(["-c", str(file), "--rewards", "{c: LengthWithin}"])
    assert replaced["rewards"] == {"c": "LengthWithin"}


RIGHT = ["--model=mine", "--rewards", "{right: ExactMatch}"]
MISTAKES: list[tuple[list[str], str]] = [
    (["--model=mine"], "grading needs a reward: --rewards '{right: ExactMatch}', or -c with a run's configuration"),
    (["--rewards", "{right: ExactMatch}"], "grading needs a model: --model with a hub id, a folder"),
    ([*RIGHT, "--success=wrong"], "--success names 'wrong', which is no reward; there are right"),
    ([*RIGHT, "--samples=0"], "--samples is 0; at least 1 answer is needed"),
    ([*RIGHT, "--rates=0.3,0.7"], "--rates must fall"),
    ([*RIGHT, "--rates=0.3"], "--rates is [0.3]; give 2 rates between 0 and 1"),
    ([*RIGHT, "--sampling.temperature=0"], "sampling.temperature is 0, so all 8 answers are the same"),
    ([*RIGHT, "--sampling.max_tokens=many"], "sampling holds a value of the wrong type"),
    ([*RIGHT, "--sampling.tokens=4"], "SamplingConfig has no field tokens"),
    ([*RIGHT, "--rewards.right.args", "{column: missing}"], "reward 'right' needs the data column 'missing'"),
    ([*RIGHT, "--rewards.right.scale", "running"], "has scale running, so a value would depend on the prompts graded"),
    ([*RIGHT, "--rewards.right.weight", "heavy"], "rewards or scoring hold a value of the wrong type"),
    (["--model=mine", "--rewards", "{right: ExactMach}"], "there is no 'ExactMach'; did you mean 'ExactMatch'?"),
    ([*RIGHT, "--rewards", "[1]"], "rewards is [1]; give a mapping of its settings"),
    ([*RIGHT, "--column=answer"], "has a column 'answer' of its own; write the difficulty to another with"),
    (["--model=last", "--rewards", "{right: ExactMatch}"], "has a last checkpoint; give its folder"),
    ([*RIGHT, "--share=0.1"], "--share belongs to --mode adversarial or expand, and this is --mode grade"),
    ([*RIGHT, "-c", "rows.jsonl"], "'rows.jsonl'"),
    ([*RIGHT, "-c", "odd.yaml"], "'odd.yaml' has a setting 'reward', which is not used here; did you mean 'rewards'?"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_one_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "odd.yaml").write_text("reward: {}\n")
    assert main([*GRADE, *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not (folder / "out.jsonl").exists()


def test_a_checkpoint_is_graded_as_its_export(folder: Path) -> None:
    """By its checkpoint and by its exported folder a policy has the same rates; the model it began from has others."""
    module = SFT(policy=PolicyConfig(name="mine"))
    module.configure_model()
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter += 0.01
    write_checkpoint({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, Path("one.ckpt"))
    export("one.ckpt", "exported")
    found = []
    for name in ("one.ckpt", "exported", "mine"):
        words = [f"--model={name}", "--rewards.even", DETAILED, "--samples=32", "--force"]
        assert main([*GRADE, *words]) == 0
        found.append([json.loads(line)["success_rate"] for line in (folder / "out.jsonl").read_text().splitlines()])
    assert found[0] == found[1]
    assert found[0] != found[2]
