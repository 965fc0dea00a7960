"""A reward that can be hacked: GRPO teaches the TinyStories model to please a sentiment lexicon.

Alone, the reward is maximal for "friend friend friend", and the policy finds that out. A KL to the start keeps it with
stories; a second reward against repetition takes this trick away, and shows what else the lexicon likes. The reward is
a user's own function in the working folder, `my_rewards.sentiment`; it needs the package vaderSentiment.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from alignment.errors import UserError
from benchmarks.online.bench import Run, alignment, draw, table, write_lines

REWARDS = '''\
"""A user's own rewards."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_analyser = SentimentIntensityAnalyzer()


def sentiment(completion: str) -> float:
    """From -1, unhappy, to 1, happy."""
    return float(_analyser.polarity_scores(completion)["compound"])
'''
NAMES = {
    "girl": ("Lily", "Mia", "Anna", "Sue", "Jane", "Lucy", "Amy", "Sara", "Kate", "Emma"),
    "boy": ("Tom", "Ben", "Sam", "Max", "Tim", "Jack", "Bob", "Leo", "Dan", "Joe"),
}
HOBBIES = (
    *("play outside", "run in the park", "read books", "eat cake", "draw pictures", "sing songs", "ride a bike"),
    *("swim", "play with toys", "look at the stars"),
)
HELD_OUT = 40

_KL = "--model.kl.coefficient=0.3"
_REPEATS = '--model.rewards.repeats={"reward": "RepetitionPenalty", "args": {"n": 2}, "weight": 2}'
VARIANTS: dict[str, tuple[str, ...]] = {
    "sentiment alone": (),
    "with KL": (_KL,),
    "with RepetitionPenalty": (_REPEATS,),
    "with both": (_KL, _REPEATS),
}
SHOWN = 2
"""Samples shown of each: those for the first held-out prompts, not chosen by how they came out."""
_END_OF_STORY = 1


def make_model(data: Path, out: Path) -> None:
    """The transformers folder. A story ends with id 1; the conversion leaves 2, which never comes."""
    script = data / "convert_stories260k.py"
    if not script.is_file():
        raise UserError(f"{script} does not exist; --data is the folder with it and with stories260K.bin")
    subprocess.run([sys.executable, str(script), str(data), str(out)], check=True, capture_output=True)
    settings = json.loads((out / "generation_config.json").read_text())
    (out / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [_END_OF_STORY, 2]}))


def write_prompts(folder: Path) -> None:
    """200 beginnings of stories: `rl.jsonl`, and 40 others in `held_out.jsonl`."""
    beginnings = [
        f"Once upon a time, there was a little {kind} named {name}. {pronoun} loved to {hobby}. One day,"
        for kind, pronoun in (("girl", "She"), ("boy", "He"))
        for name in NAMES[kind]
        for hobby in HOBBIES
    ]
    random.Random(0).shuffle(beginnings)
    write_lines(folder / "held_out.jsonl", ({"prompt": text} for text in beginnings[:HELD_OUT]))
    write_lines(folder / "rl.jsonl", ({"prompt": text} for text in beginnings[HELD_OUT:]))


def run(data: Path) -> dict[str, Any]:
    """The start and every variant, one seed each, judged by 160 samples for held-out beginnings."""
    if importlib.util.find_spec("vaderSentiment") is None:
        raise UserError("this part needs vaderSentiment: pip install vaderSentiment")
    torch.set_num_threads(1)  # the matrices are too small to share
    make_model(data, Path("stories260K").resolve())
    write_prompts(Path())
    Path("my_rewards.py").write_text(REWARDS)
    found: dict[str, Any] = {"start": judge(alignment("predict", "stories", "start"))}
    for name, words in VARIANTS.items():
        fit = alignment("fit", "stories", name, *words)
        after = alignment("predict", "stories", f"{name}, after", *words, f"--ckpt_path={fit.checkpoint}")
        found[name] = judge(after) | {
            "kl": fit.last("kl"),
            "sentiment_curve": fit.curve("rewards/sentiment/mean"),
            "kl_curve": fit.curve("kl"),
            "entropy_curve": fit.curve("entropy"),
            "seconds": fit.seconds,
            "cpu_seconds": fit.cpu_seconds,
        }
    return found


def judge(run_: Run) -> dict[str, Any]:
    """What the samples of a `predict` are like."""
    rows = run_.predictions()
    texts = [words_of(row["completion"]) for row in rows]
    texts = [words for words in texts if words]
    first = {row["index"]: row["completion"] for row in reversed(rows)}
    return {
        "sentiment": statistics.mean(row["rewards"]["sentiment"] for row in rows),
        "distinct": statistics.mean(len(set(words)) / len(words) for words in texts),
        "commonest": statistics.mean(Counter(words).most_common(1)[0][1] / len(words) for words in texts),
        "vocabulary": len({word for words in texts for word in words}),
        "samples": [first[index] for index in sorted(first)[:SHOWN]],
    }


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


_COLUMNS = (
    ("sentiment", "sentiment, -1 to 1", "{:.2f}"),
    ("distinct", "distinct words of a text", "{:.0%}"),
    ("commonest", "its commonest word", "{:.0%}"),
    ("vocabulary", "words in 160 texts", "{}"),
    ("kl", "KL, nats per token", "{:.2f}"),
    ("seconds", "seconds", "{:.0f}"),
)


def block(found: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    rows = [
        [name, *(form.format(one[key]) if key in one else "" for key, _, form in _COLUMNS)]
        for name, one in found.items()
    ]
    lines = table(["held-out beginnings", *(label for _, label, _ in _COLUMNS)], rows)
    for name, one in found.items():
        lines += ["", f"**{name}**", "", *(f"> {' '.join(text.split())}  " for text in one["samples"])]
    return lines


def picture(found: dict[str, Any], path: Path) -> None:
    titles = {"sentiment_curve": "sentiment of samples", "kl_curve": "KL, nats per token", "entropy_curve": "entropy"}
    draw(
        path,
        {title: {name: [found[name][key]] for name in VARIANTS} for key, title in titles.items()},
        "optimizer step",
    )
