"""Every fragment of configs/rewards/ scores real replies as it says, in a worker or, where it holds a model, here."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.cli import main
from alignment.rewards import RewardSuite, Samples
from tests.judge_server import Asked, Reply, judging, verdict_on_canary
from tests.reward_models import clip_cosine, save_classifier, save_clip, save_counts, save_pictures

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "rewards"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
JUDGES = ["judge", "judge_pairs"]
MODELS = ["clip_score", "faq_embedding", "refusal_classifier", "sentiment_finbert", "toxicity_classifier"]
"""Their models are made for the test, in the place of the folder or hub id that they name."""
PLAIN = sorted(set(NAMES) - {*JUDGES, *MODELS})

REPLIES = ["Thank you! The warranty is 3 years.", "You bastard, it is $4$ years, or 5. I hate that."]
ROWS = [{"answer": "3 years", "transcript": "thank you the warranty is three years", "reference": "It says 3."}] * 2
QUESTION = "How long is the warranty on the Velora lamp?"


def rewards_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["model"]["init_args"]["rewards"]


def scored(rewards: dict[str, Any], rows: list[dict[str, Any]] = ROWS) -> dict[str, list[float]]:
    samples = Samples(prompts=[QUESTION] * 2, completions=REPLIES, columns=rows)
    with RewardSuite(rewards, {"workers": 1}) as suite:
        matrix = suite.submit_samples(samples).collect()
    assert not any(faults.total() for faults in matrix.faults.values())
    return {name: matrix.raw[:, k].tolist() for k, name in enumerate(matrix.names)}


@pytest.mark.parametrize("name", NAMES)
def test_a_fragment_says_how_it_is_used(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 12
    used = [line for line in lines if line.startswith("# Use: ")]
    assert len(used) == 1
    assert re.fullmatch(
        rf"# Use: alignment fit -c configs/grpo\.yaml -c configs/rewards/{name}\.yaml( --data\.path my_\w+\.jsonl)?",
        used[0],
    )


def test_those_without_a_model() -> None:
    """All of them in one worker. "$4$" and "5" are not 3; the second reply has one abusive word."""
    for package in ("rank_bm25", "vaderSentiment", "better_profanity", "textstat", "math_verify", "jiwer"):
        pytest.importorskip(package)
    assert len(PLAIN) == 7
    found = scored({name: spec for fragment in PLAIN for name, spec in rewards_of(fragment).items()})
    assert found["professional"] == [1.0, 0.5]  # "years" of "3 years"
    assert found["sentiment"][0] > 0.6
    assert found["sentiment"][1] < 0.3
    assert found["civil"] == [1.0, 0.5]
    assert found["refuses"] == [0.0, 0.0]
    assert found["correct"] == [1.0, 0.0]
    assert found["faithful"] == [pytest.approx(6 / 7), 0.0]  # "3" for "three"
    # 29 characters in 7 words in 1 sentence (that of two words does not count), and 5 to 9 is wanted.
    index = 4.71 * 29 / 7 + 0.5 * 7 - 21.43
    assert found["readable"][0] == pytest.approx(1 - (5 - index) / 4, abs=1e-5)


def test_the_judges() -> None:
    def script(asked: Asked) -> Reply:
        if asked.canary:
            return Reply(verdict_on_canary(asked))
        parts = asked.parts
        if "REPLY" in parts:
            return Reply(f"{asked.code} {10 if '3 years' in parts['REPLY'] else 1}")
        return Reply(f"{asked.code} {'A' if '3' in parts['REPLY A'] else 'B'}")

    rewards = {name: spec for fragment in JUDGES for name, spec in rewards_of(fragment).items()}
    with judging(script) as server:
        for spec in rewards.values():
            assert spec["args"]["endpoint"]["url"] == "http://127.0.0.1:8000/v1"
            spec["args"]["endpoint"]["url"] = server.url
        samples = Samples(prompts=[QUESTION] * 2, completions=REPLIES, columns=ROWS)
        with RewardSuite(rewards, {"workers": 1}) as suite:
            matrix = suite.submit_samples(samples).collect()
    assert matrix.names == ("helpful", "preferred")
    assert matrix.raw[:, 0].tolist() == [1.0, 0.0]
    # Both the first reply and the reference have a 3: A in both orders, which is no opinion.
    assert matrix.raw[0, 1].isnan()
    assert matrix.raw[1, 1] == 0.0
    assert matrix.lost == 0


def test_a_classifier_is_loaded_once_in_a_worker(tmp_path: Path) -> None:
    """Its folder is gone when the second batch comes."""
    spec = rewards_of("sentiment_finbert")
    assert spec["sentiment"]["args"]["name"] == "ProsusAI/finbert"
    labels = {"positive": 0.7, "negative": 0.1, "neutral": 0.2}
    spec["sentiment"]["args"]["name"] = save_classifier(tmp_path / "model", labels)
    samples = Samples(prompts=[QUESTION] * 2, completions=REPLIES)
    with RewardSuite(spec, {"workers": 1}) as suite:
        for _ in range(2):
            matrix = suite.submit_samples(samples).collect()
            assert matrix.raw[:, 0].tolist() == pytest.approx([0.8, 0.8], abs=1e-6)
            shutil.rmtree(tmp_path / "model", ignore_errors=True)


def test_toxicity_by_a_classifier(tmp_path: Path) -> None:
    spec = rewards_of("toxicity_classifier")
    assert spec["civil"]["args"]["name"] == "unitary/toxic-bert"
    labels = {"toxic": 0.2, "severe_toxic": 0.9, "obscene": 0.9, "threat": 0.1, "insult": 0.4, "identity_hate": 0.9}
    spec["civil"] |= {"in_process": True}
    spec["civil"]["args"]["name"] = save_classifier(tmp_path, labels, several=True)
    assert scored(spec)["civil"] == pytest.approx([0.6, 0.6], abs=1e-6)


def test_refusal_by_a_classifier(tmp_path: Path) -> None:
    spec = rewards_of("refusal_classifier")
    assert spec["refuses"]["args"]["name"] == "ProtectAI/distilroberta-base-rejection-v1"
    spec["refuses"] |= {"in_process": True}
    spec["refuses"]["args"]["name"] = save_classifier(tmp_path, {"NORMAL": 0.8, "REJECTION": 0.2})
    assert scored(spec)["refuses"] == pytest.approx([0.2, 0.2], abs=1e-6)


def test_a_fragment_replaces_the_rewards_of_a_run(workdir: Path) -> None:
    pytest.importorskip("vaderSentiment")
    files = ["-c", str(FOLDER.parent / "grpo.yaml"), "-c", str(FOLDER / "sentiment_vader.yaml")]
    short = "--data.max_rows=4 --data.max_eval_rows=4 --data.batch_size=4 --model.completions=2 --trainer.max_steps=1"
    short += " --model.sampling.max_tokens=4 --trainer.log_every_n_steps=1 --trainer.enable_model_summary=false"
    assert main(["fit", *files, *short.split(), "--trainer.accelerator=cpu"]) == 0
    logged = "".join(file.read_text() for file in workdir.rglob("metrics.jsonl"))
    assert '"rewards/sentiment/mean"' in logged
    assert "rewards/warm" not in logged


def test_models_in_local_folders(workdir: Path) -> None:
    """Under the names that the fragments have. "3 years" is half of the first entry's words; the pictures are not read
    right by random weights, but as the two towers read them."""
    pytest.importorskip("sentence_transformers")
    save_counts(workdir / "models" / "minilm", ["the", "warranty", "3", "years"])
    clip = save_clip(workdir / "models" / "clip")
    save_pictures(workdir / "pictures")
    rewards = rewards_of("faq_embedding") | rewards_of("clip_score")
    rewards = {name: spec | {"in_process": True} for name, spec in rewards.items()}
    rows = [{"answer": "The warranty: 3 years", "image": f"{colour}.png"} for colour in ("red", "green")]
    samples = Samples(prompts=[QUESTION] * 2, completions=["3 years", "green"], columns=rows)
    matrix = RewardSuite(rewards).submit_samples(samples).collect()
    assert matrix.names == ("professional", "fitting")
    assert matrix.lost == 0
    assert matrix.raw[:, 0].tolist() == pytest.approx([1 / math.sqrt(2), 0.0], abs=1e-6)
    cosines = [clip_cosine(clip, ["[UNK]", "[UNK]"], "red"), clip_cosine(clip, ["green"], "green")]
    assert matrix.raw[:, 1].tolist() == pytest.approx([max(0.0, c) for c in cosines], abs=1e-5)
