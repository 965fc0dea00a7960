"""A tiny model sorts letters: SFT gets it part of the way, GRPO and PPO with an exact reward go on from there.

A word of six letters from a to h is to be spelled in alphabetical order. SFT, RL and the held-out words are three
disjoint sets.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import torch

from alignment.export import export
from benchmarks.online.bench import Run, alignment, draw, scaled, spread, table, write_lines

SEEDS = (0, 1, 2)
ALGORITHMS = ("grpo", "ppo")
LETTERS, LENGTH, HELD_OUT, ONLINE, WORKED = "abcdefgh", 6, 500, 4000, 9000
EXACT = "val/rewards/sorted/mean"
SAMPLED = ("--model.rollout.eval_temperature=1", "--model.rollout.eval_completions=4")


def write_words(folder: Path) -> None:
    """`sft.jsonl`, `rl.jsonl`, `held_out.jsonl`: no word is in two of them."""
    draw_ = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < HELD_OUT + ONLINE + WORKED:
        words["".join(draw_.choice(LETTERS) for _ in range(LENGTH))] = None
    everyone = [(f"sort {word}", "".join(sorted(word))) for word in words]
    held_out, rest = everyone[:HELD_OUT], everyone[HELD_OUT:]
    write_lines(folder / "held_out.jsonl", ({"prompt": asked, "answer": right} for asked, right in held_out))
    write_lines(folder / "rl.jsonl", ({"prompt": asked, "answer": right} for asked, right in rest[:ONLINE]))
    write_lines(folder / "sft.jsonl", ({"prompt": asked, "completion": right} for asked, right in rest[ONLINE:]))


def make_start() -> Run:
    """The words, and the folder `sft` with the model that RL starts from, in the current folder."""
    torch.set_num_threads(1)  # the matrices are too small to share
    write_words(Path())
    sft = alignment("fit", "tiny_sft", "sft")
    export(sft.checkpoint, Path("sft"), force=True)
    return sft


def run(data: Path) -> dict[str, Any]:
    """Both algorithms, three seeds each, from one SFT start."""
    sft = make_start()
    before = {
        "greedy": alignment("validate", "tiny_grpo", "before").last(EXACT),
        "sampled": alignment("validate", "tiny_grpo", "before-sampled", *SAMPLED).last(EXACT),
    }
    found: dict[str, Any] = {"sft_seconds": sft.seconds, "before": before}
    for algorithm in ALGORITHMS:
        found[algorithm] = [_train(algorithm, seed) for seed in SEEDS]
    return found


def _train(algorithm: str, seed: int) -> dict[str, Any]:
    config, name = f"tiny_{algorithm}", f"{algorithm}-{seed}"
    fit = alignment("fit", config, name, f"--seed_everything={seed}")
    sampled = alignment("validate", config, f"{name}-sampled", *SAMPLED, f"--ckpt_path={fit.checkpoint}")
    return {
        "seed": seed,
        "greedy": fit.last(EXACT),
        "sampled": sampled.last(EXACT),
        "held_out": fit.curve(EXACT),
        "training": fit.curve("reward"),
        "kl": _kl(fit),
        "seconds": fit.seconds,
        "cpu_seconds": fit.cpu_seconds,
    }


def _kl(fit: Run) -> float | None:
    """Nats per completion from the start at the end; None where no reference was loaded."""
    curve = fit.curve("objective/kl")
    return curve[-1][1] if curve else None


def block(found: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    before = found["before"]
    rows = [["SFT, where both start", f"{before['greedy']:.3f}", f"{before['sampled']:.3f}", "", ""]]
    for algorithm in ALGORITHMS:
        trained = found[algorithm]
        for one in trained:
            kl = "" if one["kl"] is None else f"{one['kl']:.2f}"
            times = f"{one['seconds']:.0f} ({one['cpu_seconds']:.0f})"
            name = f"{algorithm.upper()}, seed {one['seed']}"
            rows.append([name, f"{one['greedy']:.3f}", f"{one['sampled']:.3f}", kl, times])
        means = [spread([one[kind] for one in trained]) for kind in ("greedy", "sampled")]
        rows.append([f"**{algorithm.upper()}, mean ± deviation**", *(f"**{mean}**" for mean in means), "", ""])
    head = ["held-out exact match", "greedy", "sampled, T = 1", "KL, nats", "seconds (CPU)"]
    lines = table(head, rows)
    for algorithm in ALGORITHMS:
        values = [one["sampled"] for one in found[algorithm]]
        gain = statistics.mean(values) - before["sampled"]
        ratio = gain / max(statistics.stdev(values), 1e-9)
        lines += ["", f"{algorithm.upper()} gains {gain:+.3f} sampled, {ratio:.0f} deviations of its seeds."]
    return lines


def picture(found: dict[str, Any], path: Path) -> None:
    panels = {
        title: {a.upper(): [scaled(one[kind], f"tiny_{a}") for one in found[a]] for a in ALGORITHMS}
        for kind, title in (("held_out", "held-out words, greedy"), ("training", "reward of sampled training words"))
    }
    draw(path, panels, "completions sampled")
