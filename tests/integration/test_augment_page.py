"""What docs/augment.md shows works as shown, and what it names is there."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from alignment.augmentation.attacks import ATTACKS
from alignment.augmentation.generation import Generator
from alignment.augmentation.paraphrase import Answer
from alignment.cli import main
from alignment.rollout import SamplingConfig
from alignment.tiny import save_tiny
from tests.integration.test_docs import REPOSITORY, SHORT, SMALL, commands, folder

__all__ = ["folder"]
PAGE = (REPOSITORY / "docs" / "augment.md").read_text(encoding="utf-8")
REWARD = """
def right(completion, answer):
    return {"yes": 1.0, "half": 0.5, "no": 0.0}[answer]
"""


def written(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def world(folder: Path) -> Path:
    """What the page's commands read: pairs, prompts, a model, and a reward of one's own."""
    things = ["price of the lamp", "weight of the lamp", "colour of the lamp", "warranty on the lamp"]
    places = ["Add three and four", "Add five and nine", "Add two and eight", "Add six and one"]
    prompts = [f"What is the {thing} in your {shop}?" for thing in things for shop in ("shop", "catalogue")]
    prompts += [f"{place}, then name the sum." for place in places]
    written(
        folder / "my_pairs.jsonl",
        [{"prompt": text, "chosen": f"Answer {i}.", "rejected": "No."} for i, text in enumerate(prompts)],
    )
    answers = ("yes", "half", "no")
    written(folder / "my_prompts.jsonl", [{"prompt": text, "answer": answers[i % 3]} for i, text in enumerate(prompts)])
    save_tiny(folder / "models" / "mine")
    (folder / "my_rewards.py").write_text(REWARD)
    return folder


def answers(
    self: Generator, prompts: Mapping[int, str], count: int, sampling: SamplingConfig, *, seed: int
) -> dict[int, list[Answer]]:
    """What a better model than the tiny one would say."""
    assert sampling.max_tokens == 32
    return {number: [Answer(f"Kindly: {text.split(chr(10))[-1]}", False)] * count for number, text in prompts.items()}


def test_commands(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page; the model's paraphrases are scripted, the one with a sentence model is by itself."""
    monkeypatch.setattr(Generator, "answers", answers)
    for line in commands("augment.md"):
        words = shlex.split(line)[1:]
        if "models/minilm" in words:
            continue
        assert main([*words, *_short(words)]) == 0, line
    added = [json.loads(text) for text in (world / "written.jsonl").read_text().splitlines()]
    assert {row["expansion"] for row in added} == {"none", "model"}
    graded = [json.loads(text) for text in (world / "numbers.jsonl").read_text().splitlines()]
    assert {row["answer"]: row["difficulty"] for row in graded} == {"yes": 0.0, "half": 0.5, "no": 1.0}
    assert not list(world.glob(".*.grading.jsonl"))
    tracked_as_written(world)


def _short(words: list[str]) -> list[str]:
    """What makes a command short, without changing what it does."""
    if words[0] == "fit":
        return [*SMALL, *SHORT]
    unlimited = "grade" in words and "--sampling.max_tokens" not in words
    return ["--sampling.max_tokens=8"] if unlimited else []


def tracked_as_written(world: Path) -> None:
    """The last run of `robust.jsonl` holds digests, seed, settings, counts and the table."""
    client = MlflowClient(f"sqlite:///{world / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("data")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    mine = [run for run in runs if run.data.tags["data.output"] == "robust.jsonl"]
    run = max(mine, key=lambda run: run.info.start_time)
    digests = [hashlib.sha256((world / name).read_bytes()).hexdigest() for name in ("my_pairs.jsonl", "robust.jsonl")]
    assert [run.data.tags[f"data.{side}_sha256"] for side in ("input", "output")] == digests
    assert (run.data.tags["data.seed"], run.data.params["share"]) == ("1", "0.1")
    assert run.data.metrics["data/rows written"] == 13.0  # 0.1 * 12 / 0.9 = 1.3
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"augment.json", "augment.txt"}
    assert {entry.dataset.digest for entry in run.inputs.dataset_inputs} == {digest[:36] for digest in digests}
    (summary,) = [
        json.loads(file.read_text())
        for file in world.glob("runs/data/*/augment.json")
        if file.parent.name == run.info.run_id
    ]
    assert summary["counts"]["instruction_override"] + summary["counts"]["special_tokens"] == 1
    assert (summary["seed"], summary["output"]["sha256"]) == (1, digests[1])


def test_the_command_with_a_sentence_model(world: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from tests.unit.test_augment_expand import save_sentence_model

    (line,) = [line for line in commands("augment.md") if "models/minilm" in line]
    save_sentence_model(world / "models" / "minilm")
    assert main([*shlex.split(line)[1:], "--no_tracking"]) == 0


def test_the_page_names_every_attack() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE) == list(ATTACKS)
