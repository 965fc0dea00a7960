"""The online quickstart end to end on the model that needs no download, shorter than with `MODEL=tiny`."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from alignment import quickstart_grpo
from alignment.chat import ChatEncoder, Message
from alignment.quickstart_grpo import COLUMNS, Evaluation, Report, question
from alignment.sorting import HELD_OUT, LENGTH, PROMPTS, WORKED, write_rows
from alignment.tiny import tiny_tokenizer

STEPS = 40


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    root = tmp_path_factory.mktemp("quickstart-grpo")
    arguments = ["--model", "tiny", "--root", str(root), "--steps", str(STEPS)]
    assert quickstart_grpo.main([*arguments, "--figure", str(root / "picture.png")]) == 0
    (summary,) = root.glob("runs/quickstart-grpo/*/quickstart_grpo.json")
    return root, Report.from_json(summary.read_text())


@pytest.mark.slow
def test_training_gains_on_held_out_prompts(done: tuple[Path, Report]) -> None:
    _, report = done
    before, after = (report.evaluations[name].metrics for name in COLUMNS)
    assert after["reward"] > before["reward"]
    assert len(report.curve) == STEPS // 2  # two optimizer steps a batch
    assert report.curve[-1][1] > report.curve[0][1]


@pytest.mark.slow
def test_what_it_leaves_behind(done: tuple[Path, Report]) -> None:
    root, report = done
    assert (root / "picture.png").stat().st_size > 5_000
    (page,) = root.glob("runs/quickstart-grpo/*/quickstart_grpo.md")
    assert f"| right answers | {report.evaluations['before'].metrics['rewards/right/mean']:.0%} |" in page.read_text()
    assert AutoModelForCausalLM.from_pretrained(report.policy).num_parameters() > 200_000
    with sqlite3.connect(root / "mlflow.db") as database:
        steps = database.execute("select step from metrics where key = 'heldout/reward' order by step").fetchall()
        names = {name for (name,) in database.execute("select name from runs")}
    assert steps == [(0,), (1,)]
    assert {"before", "grpo_tiny", "after", "before-after-tiny"} <= names


def test_the_rows_are_a_task_and_no_prompt_is_in_two_files(tmp_path: Path) -> None:
    paths = write_rows(tmp_path)
    rows = {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in paths.items()}
    assert {name: len(part) for name, part in rows.items()} == {
        "held_out": HELD_OUT,
        "prompts": PROMPTS,
        "worked": WORKED,
    }
    prompts = [row["prompt"] for part in rows.values() for row in part]
    assert len(prompts) == len(set(prompts))
    for row in rows["worked"][:20]:
        word = row["prompt"].removeprefix("sort ")
        assert (len(word), row["completion"]) == (LENGTH, "".join(sorted(word)))


def test_the_question_of_a_rendered_prompt() -> None:
    system = "<|im_start|>system\nYou help<|im_end|>\n"
    asked = f"{system}<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert question(asked) == "What is 2 + 3?"
    assert question("sort abc") == "sort abc"
    assert question("Be brief.\n\nUser:\nA?\n\nAssistant:\nB</s>\n\nUser:\nC\nor D?\n\nAssistant:\n") == "C\nor D?"


def test_the_samples_are_headed_by_what_was_asked(tmp_path: Path) -> None:
    """The letters of the file, through the template of the tiny configuration."""
    encoder = ChatEncoder(tokenizer=tiny_tokenizer(), template="plain")
    row = json.loads(write_rows(tmp_path)["held_out"].read_text().splitlines()[0])
    prompt = tiny_tokenizer().decode(encoder.prompt([Message("user", row["prompt"])]))
    evaluation = Evaluation(metrics={}, samples=[{"prompt": prompt, "completion": "abc"}])
    settings = {"model": "tiny", "curve": [], "seconds": {}, "peak_gb": 1.0, "policy": ""}
    report = Report(evaluations={"before": evaluation, "GRPO": evaluation}, **settings)
    assert report.replies() == [(row["prompt"], ["abc", "abc"])]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart_grpo.main(["--model", str(tmp_path / "nothing"), "--root", str(tmp_path)]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("quickstart-grpo: ")
