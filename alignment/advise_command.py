"""`alignment advise`: which algorithm to start with, what it will cost, and a configuration that runs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alignment.advice import QUESTIONS, Choice, Run, decide
from alignment.errors import UserError

WORLD = "world:support"
REWARD_FOLDER = "models/reward"
"""Where PPO's configuration looks for the exported reward model."""
LORA_FACTOR = 10
"""Adapters learn at ten times the rate of all weights (Schulman et al. 2025, LoRA Without Regret)."""
_WORLD_REWARDS = {
    "one": {"right": "alignment.rewards.support.right"},
    "several": {"right": "alignment.rewards.support.right", "warm": "alignment.rewards.support.warmth"},
}


def main(argv: Sequence[str]) -> int:
    """Returns 0; raises UserError for an answer, a model or rows that do not fit."""
    given = _parser().parse_args(argv)
    choice = decide(lambda name: getattr(given, name) or _asked(name))
    rewards = _rewards(given.reward, given.data, choice, given.rewards)
    files = [given.out / f"{run.name}.yaml" for run in choice.runs]
    if taken := [str(file) for file in files if file.exists() and not given.force]:
        raise UserError(f"{', '.join(taken)} exists; choose another folder with --out, or replace it with --force")
    device = given.device or _device()
    print(f"Start with {choice.title} ({choice.page}):")
    for reason in choice.because:
        print(f"- {reason}")
    for run, file in zip(choice.runs, files, strict=True):
        changes, lines = _cost(run, given, device)
        print(f"\n{run.module}\n" + "\n".join(lines))
        written = configuration(run, model=given.model, data=given.data, rewards=rewards, changes=changes,
                                reply_tokens=given.reply_tokens, device=device)  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        head = [f"# {choice.title}, by `alignment advise`. Why:", *(f"# - {reason}" for reason in choice.because)]
        text = yaml.safe_dump(written, sort_keys=False)
        file.write_text("\n".join(head) + f"\n{text}", encoding="utf-8")
    print("\nRun it:")
    for number, file in enumerate(files):
        if number:
            print(f"  alignment export last {REWARD_FOLDER}")
        print(f"  alignment fit -c {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alignment advise",
        description="Recommend an algorithm, estimate what it needs, and write its configuration. What is not given is "
        "asked.",
        epilog="alignment advise --signal pairs --diversity no --compute little --length short --data my_pairs.jsonl",
    )
    for name, question in QUESTIONS.items():
        meaning = "; ".join(f"{answer}: {text}" for answer, text in question.answers.items())
        parser.add_argument(f"--{name}", choices=list(question.answers), help=f"{question.text} {meaning}")
    parser.add_argument("--model", default="tiny", help="hub id, folder or GGUF file (default: a tiny one, to try out)")
    parser.add_argument("--data", default=WORLD, help="your rows (default: the built-in ones)")
    parser.add_argument("--reward", action="append", metavar="NAME=PATH", help="a reward: right=my_rewards.right")
    parser.add_argument("--reply_tokens", type=int, default=256, help="longest reply to sample (default: 256)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of the machine to run on (default: this one's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--out", type=Path, default=Path("advised"), help="folder of the YAML files (default: advised)")
    parser.add_argument("--force", action="store_true", help="replace files of an earlier advice")
    return parser


def _asked(name: str) -> str:
    """The answer of whoever sits at the terminal. Raises UserError where nobody does."""
    question = QUESTIONS[name]
    if not sys.stdin.isatty():
        raise UserError(f"{question.text} Answer with --{name} {' or '.join(question.answers)}")
    print(f"\n{question.text}")
    answers = list(question.answers)
    for number, answer in enumerate(answers, 1):
        print(f"  {number}  {answer}: {question.answers[answer]}")
    while True:
        said = input("> ").strip()
        if said in answers:
            return said
        if said.isdigit() and 1 <= int(said) <= len(answers):
            return answers[int(said) - 1]
        print(f"a number from 1 to {len(answers)}, or one of {', '.join(answers)}")


def _rewards(given: Sequence[str] | None, data: str, choice: Choice, count: str | None) -> dict[str, str]:
    """name -> path, of runs that score by the user's rewards; {} where none does."""
    wanted = [run for run in choice.runs if run.online and "rewards" not in run.settings]
    if not wanted:
        if given:
            raise UserError(f"--reward: {choice.title} takes no rewards of yours")
        return {}
    if not given:
        if data != WORLD:
            raise UserError(f"{choice.title} needs rewards for your rows: --reward NAME=PATH, for example "
                            "--reward right=my_rewards.right (docs/rewards.md)")  # fmt: skip
        return _WORLD_REWARDS[count or "one"]
    rewards = {name: path for name, _, path in (text.partition("=") for text in given)}
    if not all(rewards) or not all(rewards.values()):
        raise UserError(f"--reward takes NAME=PATH, for example right=my_rewards.right; got '{' '.join(given)}'")
    if count == "several" and len(rewards) < 2:
        raise UserError(f"{choice.title} is for several rewards; give --reward once for each")
    return rewards


def _device() -> str:
    import torch  # here: answers and mistakes come first

    return "cuda" if torch.cuda.is_available() else "cpu"


def _cost(run: Run, given: argparse.Namespace, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Settings that make a run fit, and what its memory and time are, in lines."""
    import torch

    from alignment import advice_cost, memory, memory_report
    from alignment.policy import PolicyConfig, load_tokenizer

    device = torch.device(kind)
    policy = PolicyConfig(name=given.model)
    data = getattr(importlib.import_module("datamodules"), run.data)
    rows_of = data(given.data, tokenizer=load_tokenizer(policy))
    rows_of.prepare_data()
    rows_of.setup("fit")
    rows = advice_cost.Rows.of(rows_of.groups("train"), given.reply_tokens)
    limit = round(given.memory * 2**30) if given.memory else memory.available(device)
    plan = advice_cost.plan(run, policy, rows)
    found = memory.estimate(plan)
    lines = [f"{rows.count:,} rows, {rows.prompt:.0f} + {rows.reply:.0f} tokens on average"]
    changes: dict[str, Any] = {}
    total = found.total
    if total > limit:
        options = memory_report.advice(plan, limit)
        if not options or options[0][1] > limit:
            raise UserError(
                f"{run.module} with {given.model} needs {memory_report.size(options[0][1] if options else total)} at "
                f"least and there is {memory_report.size(limit)}: take a smaller model, or a larger machine (--memory)"
            )
        name, total = options[0]
        changes = _nested(name)
        lines.append(f"does not fit as it is ({memory_report.size(found.total)}): {name}")
    lines.append(f"memory: about {memory_report.size(total)} of {memory_report.size(limit)}")
    rates = advice_cost.measure(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    least, most = advice_cost.seconds(run, rows, found.parameters, found.weights, rates, _passes(run))
    lines.append(f"time: {_span(least)} to {_span(most)} an epoch on this machine ({rates.flops / 1e9:,.0f} GFLOP/s)")
    return changes, lines


def _passes(run: Run) -> int:
    """How often a module learns from each of its samples: the class's own default."""
    module = getattr(importlib.import_module("modules"), run.module)
    parameter = inspect.signature(module.__init__).parameters.get("epochs")
    return 1 if parameter is None else int(parameter.default)


def _nested(text: str) -> dict[str, Any]:
    """`policy.lora.r=16 reference=cached` as nested settings."""
    found: dict[str, Any] = {}
    for pair in text.split():
        path, value = pair.split("=", 1)
        *above, last = path.split(".")
        inner = found
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = yaml.safe_load(value)
    return found


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def configuration(
    run: Run,
    *,
    model: str,
    data: str,
    rewards: Mapping[str, str],
    changes: Mapping[str, Any],
    reply_tokens: int,
    device: str,
) -> dict[str, Any]:
    """What is written: everything the run changes.

    Args:
        rewards: of a run that has none in its own settings.
        changes: what makes it fit (`alignment.memory_report.advice`).
        reply_tokens: most tokens of a sampled reply.
        device: "cpu" or "cuda".
    """
    settings = {**run.settings, **{key: value for key, value in changes.items() if key not in ("policy", "optim")}}
    policy = {"name": model, **changes.get("policy", {})}
    lr = run.lr * (LORA_FACTOR if "lora" in policy else 1)
    if run.online:
        settings = {"rewards": dict(rewards), **settings, "sampling": {"max_tokens": reply_tokens}}
    metric, mode = run.monitor
    callbacks = [{"class_path": "callbacks.Checkpoint", "init_args": {"monitor": metric, "mode": mode}},
                 {"class_path": "callbacks.Doctor"}]  # fmt: skip
    trainer: dict[str, Any] = {"max_epochs": 1, "callbacks": callbacks}
    if device == "cuda":
        trainer |= {"accelerator": "gpu", "precision": "bf16-mixed"}
    return {
        "seed_everything": 0,
        "model": {
            "class_path": f"modules.{run.module}",
            "init_args": {"policy": policy, **settings, "optim": {"lr": lr, **changes.get("optim", {})}},
        },
        "data": {"class_path": f"datamodules.{run.data}", "init_args": {"path": data, "batch_size": run.batch_size}},
        "trainer": trainer,
    }
