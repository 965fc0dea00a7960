"""benchmarks.online: the report keeps what was written by hand, and no word is in two sets. The runs are the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.online import tiny
from benchmarks.online.bench import per_batch, read_lines, scaled
from benchmarks.online.report import put_block
from benchmarks.online.stories import words_of, write_prompts


def test_a_block_is_replaced_and_the_prose_stays(tmp_path: Path) -> None:
    page = tmp_path / "reports" / "online.md"
    put_block(page, "tiny", ["| old |"])
    page.write_text(page.read_text() + "\nWritten by hand.\n")
    put_block(page, "faults", ["| 7 |"])
    put_block(page, "tiny", [r"| new \1 |"])
    text = page.read_text()
    assert "old" not in text
    assert text.index("# Online RL") < text.index(r"| new \1 |") < text.index("Written by hand.") < text.index("| 7 |")
    assert [text.count(f"<!-- {part}: end -->") for part in ("tiny", "faults")] == [1, 1]


def test_training_and_held_out_share_nothing(tmp_path: Path) -> None:
    tiny.write_words(tmp_path)
    sets = [{row["prompt"] for row in read_lines(tmp_path / f"{n}.jsonl")} for n in ("sft", "rl", "held_out")]
    assert [len(words) for words in sets] == [9000, 4000, 500]
    assert len(set.union(*sets)) == 13_500
    row = read_lines(tmp_path / "rl.jsonl")[0]
    assert row["answer"] == "".join(sorted(row["prompt"].removeprefix("sort ")))
    write_prompts(tmp_path)
    asked = [{row["prompt"] for row in read_lines(tmp_path / f"{n}.jsonl")} for n in ("rl", "held_out")]
    assert [len(prompts) for prompts in asked] == [160, 40]
    assert not asked[0] & asked[1]


@pytest.mark.parametrize(("config", "size"), [("tiny_grpo", 32 * 8), ("tiny_ppo", 256), ("stories", 16 * 8)])
def test_completions_of_a_batch(config: str, size: int) -> None:
    assert per_batch(config) == size
    assert scaled([(1, 0.5), (20, 0.75)], config) == [(size, 0.5), (20 * size, 0.75)]


def test_words() -> None:
    assert words_of('She said, "Don\'t!"\nfriend, FRIEND 3') == ["she", "said", "don't", "friend", "friend"]


def test_a_table_of_gains() -> None:
    one = {"greedy": 0.9, "kl": None, "seconds": 61.2, "cpu_seconds": 40.4}
    runs = [{**one, "seed": seed, "sampled": sampled} for seed, sampled in ((0, 0.7), (1, 0.8), (2, 0.9))]
    found = {"before": {"greedy": 0.6, "sampled": 0.2}, "grpo": runs, "ppo": runs}
    lines = tiny.block(json.loads(json.dumps(found)))
    assert "| GRPO, seed 1 | 0.900 | 0.800 |  | 61 (40) |" in lines
    # the mean of the seeds is .8, their deviation .1
    assert "| **GRPO, mean ± deviation** | **0.900 ± 0.000** | **0.800 ± 0.100** |  |  |" in lines
    assert "GRPO gains +0.600 sampled, 6 deviations of its seeds." in lines
