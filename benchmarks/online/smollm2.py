"""SmolLM2 with LoRA on easy arithmetic of reasoning-gym: GRPO and PPO, three seeds each, on held-out instances.

The model starts as it was published. It is asked for products of one-digit numbers, greatest common divisors and short
sums; it gets 1 for the right number, and half as much again if it says so without words (an equation may lead to it).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from benchmarks.online.bench import Run, alignment, draw, scaled, spread, table

SEEDS = (0, 1, 2)
ALGORITHMS = ("grpo", "ppo")
TASKS = {"multiplication": "products", "Greatest Common Divisor": "gcd", "arithmetic problem": "chain_sum"}
"""Words of a question -> its task."""
_MEASURES = {"right": "right", "answer_only": "right, no words", "reward": "reward"}


def run(
    data: Path,
    model: Path,
    seeds: Sequence[int] = SEEDS,
    algorithms: Sequence[str] = ALGORITHMS,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Both algorithms, a run for each seed.

    Args:
        model: folder of SmolLM2. words: further words of the command line, for trials.
    """
    if not (model / "config.json").is_file():
        raise UserError(f"{model} is no model; fetch it with: alignment fetch smollm2")
    own = (f"--model.policy.name={model}", *words)
    found: dict[str, Any] = {"before": _judge(alignment("predict", "smollm2_grpo", "before", *own))}
    for algorithm in algorithms:
        found[algorithm] = [_train(algorithm, seed, own) for seed in seeds]
    return found


def _train(algorithm: str, seed: int, own: Sequence[str]) -> dict[str, Any]:
    config, name = f"smollm2_{algorithm}", f"{algorithm}-{seed}"
    fit = alignment("fit", config, name, *own, f"--seed_everything={seed}")
    after = alignment("predict", config, f"{name}, after", *own, f"--ckpt_path={fit.checkpoint}")
    curves = {measure: fit.curve(f"val/{path}") for measure, path in _PATHS.items()}
    return _judge(after) | {
        "seed": seed,
        "held_out": curves,
        "training": {measure: fit.curve(path) for measure, path in _PATHS.items()},
        "seconds": fit.seconds,
    }


_PATHS = {"right": "rewards/right/mean", "answer_only": "rewards/answer_only/mean", "reward": "reward"}


def _judge(run_: Run) -> dict[str, Any]:
    """Means over held-out instances, and of right answers by task."""
    rows = run_.predictions()
    tasks: dict[str, list[float]] = {}
    for row in rows:
        tasks.setdefault(_task(row["prompt"]), []).append(row["rewards"]["right"])
    return {
        "instances": len(rows),
        "right": statistics.mean(row["rewards"]["right"] for row in rows),
        "answer_only": statistics.mean(row["rewards"]["answer_only"] for row in rows),
        "reward": statistics.mean(row["reward"] for row in rows),
        "tasks": {task: statistics.mean(values) for task, values in sorted(tasks.items())},
        "samples": [(_question(row["prompt"]), row["completion"]) for row in rows[:4]],
    }


def _task(prompt: str) -> str:
    return next((task for words, task in TASKS.items() if words in prompt), "other")


def _question(prompt: str) -> str:
    """The line of a rendered prompt that asks: the longest one with a digit."""
    return max((line for line in prompt.splitlines() if any(c.isdigit() for c in line)), key=len, default=prompt)


def block(found: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    before = found["before"]
    tasks = list(before["tasks"])

    def cells(one: dict[str, Any], time: str) -> list[str]:
        values = [one[measure] for measure in _MEASURES] + [one["tasks"][task] for task in tasks]
        return [*(f"{value:.2f}" for value in values), time]

    rows = [["as published", *cells(before, "")]]
    for algorithm in _algorithms(found):
        trained = found[algorithm]
        for one in trained:
            rows.append([f"{algorithm.upper()}, seed {one['seed']}", *cells(one, f"{one['seconds']:.0f}")])
        means = [spread([one[m] for one in trained]) for m in _MEASURES]
        means += [spread([one["tasks"][task] for one in trained]) for task in tasks]
        rows.append([f"**{algorithm.upper()}, mean ± deviation**", *(f"**{mean}**" for mean in means), ""])
    head = [f"{before['instances']} held-out instances, greedy", *_MEASURES.values(), *tasks, "seconds"]
    lines = table(head, rows)
    lines += ["", "The first held-out instances, before and after (seed 0):", ""]
    for i, (question, reply) in enumerate(before["samples"]):
        lines.append(f"> **{question}**  ")
        lines.append(f"> as published: {_flat(reply)}  ")
        lines += [f"> {a.upper()}: {_flat(found[a][0]['samples'][i][1])}  " for a in _algorithms(found)]
        lines.append("")
    return lines


def _algorithms(found: dict[str, Any]) -> list[str]:
    return [algorithm for algorithm in ALGORITHMS if algorithm in found]


def _flat(text: str) -> str:
    return " ".join(text.split())


def picture(found: dict[str, Any], path: Path) -> None:
    panels = {}
    for title, kind, measure in (
        ("held-out: right answers, greedy", "held_out", "right"),
        ("held-out: reward, greedy", "held_out", "reward"),
        ("training: reward of samples", "training", "reward"),
    ):
        panels[title] = {
            a.upper(): [scaled(one[kind][measure], f"smollm2_{a}") for one in found[a]] for a in _algorithms(found)
        }
    draw(path, panels, "completions sampled")
