"""Real models on real files: SFT, RewardModel and DPO; what became of every row, held-out figures before and after.

    python -m benchmarks.real_data --data FOLDER [--only NAME ...] [--out reports/real_data.md]

FOLDER holds public files under their own names (see TRIALS); a trial whose file is missing is reported as not run.
Every trial takes the ordinary path, `alignment validate` for "before", `alignment fit` for "after", each a run of the
experiment `real_data`. SmolLM2 must have been fetched (`alignment fetch smollm2`); the TinyStories folder is a plain
transformers folder, `--stories`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers

from alignment import cli, runs

EXPERIMENT = "real_data"
SMOLLM2, STORIES = "smollm2", "stories260K"

RASBT = "rasbt_instruction-data.json"
RASBT_PAIRS = "rasbt_instruction-data-with-preference.json"
PERSONA = "anthropic_persona_agreeableness.jsonl"
LONG = "llamafactory_dpo_en_demo.json"
NESTED = "llamafactory_v1_dpo_demo.jsonl"

PERSONA_COLUMNS = (
    '--data.columns={"prompt": "question", "chosen": "answer_matching_behavior", '
    '"rejected": "answer_not_matching_behavior"}'
)
LORA = ("--model.policy.lora.r=16",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One model, one algorithm, one file.

    Args:
        module: SFT, RewardModel or DPO. model: which model. file: name in the data folder.
        steps: optimizer steps. lr: peak learning rate. extra: further words of the command line.
    """

    module: str
    model: str
    file: str
    steps: int
    lr: float
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}-{self.model}-{Path(self.file).stem}"


TRIALS = (
    Trial(module="SFT", model=STORIES, file=RASBT, steps=100, lr=2e-3),
    Trial(module="DPO", model=STORIES, file=RASBT_PAIRS, steps=100, lr=5e-4),
    Trial(module="SFT", model=SMOLLM2, file=RASBT, steps=40, lr=1e-3, extra=LORA),
    Trial(module="RewardModel", model=SMOLLM2, file=RASBT_PAIRS, steps=40, lr=3e-4, extra=LORA),
    Trial(module="DPO", model=SMOLLM2, file=RASBT_PAIRS, steps=30, lr=2e-4, extra=LORA),
    Trial(module="SFT", model=SMOLLM2, file=PERSONA, steps=20, lr=3e-4, extra=(*LORA, PERSONA_COLUMNS)),
    Trial(module="RewardModel", model=SMOLLM2, file=PERSONA, steps=40, lr=3e-4, extra=(*LORA, PERSONA_COLUMNS)),
    Trial(module="DPO", model=SMOLLM2, file=PERSONA, steps=40, lr=3e-4, extra=(*LORA, PERSONA_COLUMNS)),
    *(
        Trial(
            module=module,
            model=SMOLLM2,
            file=LONG,
            steps=12,
            lr=3e-4,
            extra=(
                *LORA,
                "--data.max_prompt_tokens=384",
                "--data.max_completion_tokens=192",
                "--data.val_fraction=0.08",
            ),
        )
        for module in ("SFT", "RewardModel", "DPO")
    ),
    *(
        Trial(
            module=module,
            model=SMOLLM2,
            file=NESTED,
            steps=4,
            lr=3e-4,
            extra=(*LORA, "--data.batch_size=4", "--data.val_fraction=0.2", "--data.max_completion_tokens=256"),
        )
        for module in ("SFT", "RewardModel", "DPO")
    ),
)

HELD_OUT = {
    "SFT": ("val/loss", "val/perplexity"),
    "RewardModel": ("val/loss", "val/rewards/accuracies"),
    "DPO": ("val/loss", "val/rewards/accuracies", "val/rewards/margins"),
}
DATA = {"SFT": "SupervisedData", "RewardModel": "PreferenceData", "DPO": "PreferenceData"}


@dataclass(kw_only=True)
class Outcome:
    """What a trial showed; `before` and `after` by metric, `rows` as the data report has them."""

    trial: Trial
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    missing: str = ""


def run_trial(trial: Trial, data: Path, models: dict[str, Path], root: Path) -> Outcome:
    """Validate, then fit with a validation at the end."""
    outcome = Outcome(trial=trial)
    for needed in (data / trial.file, models[trial.model]):
        if not needed.exists():
            outcome.missing = f"{needed} does not exist"
            return outcome
    outcome.before = _metrics(trial, "validate", _words(trial, "validate", data, models, root), root)
    fit = [
        *_words(trial, "fit", data, models, root),
        f"--trainer.max_steps={trial.steps}",
        "--trainer.max_epochs=50",
        f"--trainer.val_check_interval={trial.steps}",
        "--trainer.check_val_every_n_epoch=null",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.log_every_n_steps=5",
        f"--model.optim.lr={trial.lr}",
        "--model.optim.warmup_steps=3",
    ]
    outcome.after = _metrics(trial, "fit", fit, root)
    outcome.rows = _rows(trial, data, models)
    return outcome


def _words(trial: Trial, command: str, data: Path, models: dict[str, Path], root: Path) -> list[str]:
    reference = ["--model.reference=auto"] if trial.module == "DPO" else []
    return [
        command,
        f"--model={trial.module}",
        f"--model.policy.name={models[trial.model]}",
        *reference,
        f"--data={DATA[trial.module]}",
        f"--data.path={data / trial.file}",
        "--data.val_fraction=0.1",
        "--data.max_prompt_tokens=256",
        "--data.max_completion_tokens=128",
        *trial.extra,
        "--trainer.accelerator=cpu",
        "--trainer.enable_checkpointing=false",
        "--trainer.logger=alignment.tracking.TrackingLogger",
        f"--trainer.logger.root={root}",
        f"--trainer.logger.experiment_name={EXPERIMENT}",
        f"--trainer.logger.run_name={trial.name}-{command}",
    ]


def _metrics(trial: Trial, command: str, words: list[str], root: Path) -> dict[str, float]:
    """The last held-out values the run wrote. Raises RuntimeError when the command failed."""
    if cli.main(words) != 0:
        raise RuntimeError(f"alignment {' '.join(words)} failed")
    folder, _ = next(runs.find_runs(root.resolve(), EXPERIMENT, run_name=f"{trial.name}-{command}"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: line[name] for line in lines for name in HELD_OUT[trial.module] if name in line}


def _rows(trial: Trial, data: Path, models: dict[str, Path]) -> list[str]:
    """The data report, once more from the cache that training used."""
    import datamodules
    from alignment.policy import PolicyConfig, load_tokenizer

    settings: dict[str, Any] = {"max_prompt_tokens": 256, "max_completion_tokens": 128, "val_fraction": 0.1}
    for word in trial.extra:
        name, _, value = word.removeprefix("--data.").partition("=")
        if word.startswith("--data."):
            settings[name] = json.loads(value)
    tokenizer = load_tokenizer(PolicyConfig(name=str(models[trial.model])))
    module = getattr(datamodules, DATA[trial.module])(path=str(data / trial.file), tokenizer=tokenizer, **settings)
    module.groups("train")
    return [f"{what}: {value}" for what, value in module.report.lines()]


def report(outcomes: list[Outcome], command: str) -> str:
    """The committed Markdown report."""
    lines = [
        "# Real models on real files",
        "",
        f"Command: `{command}`. Machine: {platform.machine()}, {os.cpu_count()} CPU cores, "
        f"{torch.get_num_threads()} torch threads; Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, lightning {lightning.__version__}. One seed (0). Peak memory of the "
        f"whole process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.1f} GB.",
        "",
        "Held-out rows share no prompt with training rows. `before` is the model as it came; a reward head starts at "
        "random and DPO's implicit reward at exactly 0 (ties count as wrong), so their accuracy before is chance or 0.",
        "",
        "| trial | steps | held out before | held out after |",
        "|---|---|---|---|",
    ]
    for o in outcomes:
        if o.missing:
            lines.append(f"| {o.trial.name} | – | not run: {o.missing} | |")
            continue
        before, after = (", ".join(f"{k[4:]} {v:.4f}" for k, v in m.items()) for m in (o.before, o.after))
        lines.append(f"| {o.trial.name} | {o.trial.steps} | {before} | {after} |")
    lines += ["", "## Rows", ""]
    for o in outcomes:
        if o.rows:
            lines += [f"**{o.trial.name}**", "", *(f"- {row}" for row in o.rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_data", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the public files")
    parser.add_argument("--smollm2", type=Path, default=Path("models/smollm2"), help="folder of SmolLM2")
    parser.add_argument("--stories", type=Path, default=Path("models/stories260K"), help="folder of stories260K")
    parser.add_argument("--only", nargs="*", default=[], help="names of trials to run, by substring; default all")
    parser.add_argument("--root", type=Path, default=Path(), help="folder of runs and of the tracker's database")
    parser.add_argument("--out", type=Path, default=Path("reports/real_data.md"), help="the report")
    args = parser.parse_args(argv)
    chosen = [t for t in TRIALS if not args.only or any(part in t.name for part in args.only)]
    outcomes = []
    for trial in chosen:
        print(f"=== {trial.name}", flush=True)
        outcomes.append(run_trial(trial, args.data, {SMOLLM2: args.smollm2, STORIES: args.stories}, args.root))
    command = "python -m benchmarks.real_data --data FOLDER" + "".join(f" --only {part}" for part in args.only)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(report(outcomes, command))
    print(f"report: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
