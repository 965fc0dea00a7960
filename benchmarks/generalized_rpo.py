"""DPO against GeneralizedRPO: what its terms buy and what they cost, on held-out pairs and in the model's own words.

    python -m benchmarks.generalized_rpo --work FOLDER [--model models/smollm2] [--data world:support]
        [--seeds 0 1 2] [--variants dpo default] [--rows 512] [--sft-rows 256] [--val-fraction 0.05]
        [--precision bf16-mixed] [--prompts 32] [--samples 8]

Every variant is one class with other weights of its terms: with both at 0 its loss and gradient are those of
`modules.DPO` (tests/unit/test_generalized_rpo.py), and it still measures what the others train on. All start from the
same model (after SFT on the built-in world, unless `--sft-rows 0`), and a seed gives all of them the same batches and
the same new adapter. Then, on held-out pairs (of products that no training row names) and on replies to their prompts:

    accuracy      share of pairs with log-ratio of the chosen above that of the rejected
    entropy       nats per token of the reference replies; entropy_own: of the model's own samples
    smooth        R_smooth by probability of the chosen replies; smooth_own: of the model's own samples
    distinct_1/2  different n-grams over all n-grams among the samples of a prompt (Li et al. 2016, arXiv 1510.03055)
    self_bleu     BLEU of the samples, each against the others to its prompt, 0 to 1, less is more diverse (Zhu et al.
                  2018, arXiv 1802.01886), by torchmetrics' SacreBLEU
    right, warmth judged on the samples, where the data is the built-in world (`alignment.world`)
    length        tokens of a sample; seconds: of training

`--data` may be any file that `datamodules.PreferenceData` reads; `--val-fraction` says how much of it is held out.
Writes `generalized_rpo.json` and `generalized_rpo.md` to `--out`: each measure by variant, and its difference from DPO
paired by seed with a 95 % interval of Student's t. Both keep what was found on other data, a section each. A finished
run is not done again: `--work` keeps its figures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from alignment import world
from alignment.batches import Group, GroupBatch
from alignment.causal_lm import evaluating
from alignment.chat import end_ids
from alignment.diversity import distinct, self_bleu
from alignment.export import export
from alignment.local_rollout import LocalRollout
from alignment.regularisers import normalised_entropy
from alignment.rollout import SamplingConfig, stop_ids_of
from alignment.smoothness import neighbours, smooth_values
from benchmarks.online.bench import Run, alignment, machine, spread, table, working_in
from datamodules import PreferenceData
from modules import GeneralizedRPO

REPOSITORY = Path(__file__).resolve().parents[1]
EXPERIMENT = "generalized_rpo"
BASELINE = "dpo"

VARIANTS: dict[str, dict[str, Any]] = {
    "dpo": {"lambda_entropy": 0.0, "lambda_smooth": 0.0},
    "default": {},
    "entropy": {"lambda_entropy": 1.0, "lambda_smooth": 0.0},
    "entropy, uniform": {"lambda_entropy": 1.0, "lambda_smooth": 0.0, "entropy_floor": "uniform"},
    "smooth": {"lambda_entropy": 0.0, "lambda_smooth": 1.0},
    "smooth, logprob": {"lambda_entropy": 0.0, "lambda_smooth": 1.0, "smoothness": "logprob"},
    "both": {"lambda_entropy": 1.0, "lambda_smooth": 1.0},
    "both, clipped": {"lambda_entropy": 1.0, "lambda_smooth": 1.0, "component_clip": {"at": "states"}},
}
"""Name -> settings of GeneralizedRPO: the class's own lambdas of .01, and a hundred times that for each term."""

TESTED = {
    "accuracy": "test/rewards/accuracies",
    "margin": "test/rewards/margins",
    "entropy": "test/entropy",
    "deficit": "test/loss/entropy",
    "p_mean": "test/p_mean",
}
DIRECTION = {"accuracy": 1, "distinct_1": 1, "distinct_2": 1, "self_bleu": -1, "smooth": -1, "right": 1, "warmth": 1}
"""Measures of which more (1) or less (-1) is what one wants; of the others the report only says that they moved."""

# Two-sided 97.5 % points of Student's t by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the study; all are part of a finished run's name.

    Args:
        model: folder of the model. data: what pairs come from. rows: training pairs. sft_rows: rows of the SFT before.
        eval_rows: most held-out pairs, of validation and of test, where the data has rows of their own for those.
        val_fraction: of the prompts held out, where it has not.
        prompts: held-out prompts that are answered. samples: replies to each, at temperature 1.
        lr, batch_size, precision: of training. lora: rank of the adapter; 0 trains all weights.
    """

    model: str
    data: str = "world:support"
    rows: int = 512
    sft_rows: int = 256
    eval_rows: int = 128
    val_fraction: float = 0.05
    prompts: int = 32
    samples: int = 8
    lr: float = 3e-4
    batch_size: int = 8
    precision: str = "32-true"
    lora: int = 16
    max_tokens: int = 48


# ---------------------------------------------------------------------- training


def start(plan: Plan) -> Path:
    """The folder of the model that every variant starts from; made once."""
    if not plan.sft_rows:
        return Path(plan.model)
    folder = Path(f"start-{plan.sft_rows}").resolve()
    if not (folder / "config.json").is_file():
        words = [*_common(plan, Path(plan.model)), f"--data.max_rows={plan.sft_rows}"]
        run = alignment("fit", str(REPOSITORY / "configs/quickstart/sft"), "sft", *words, experiment=EXPERIMENT)
        export(run.checkpoint, folder, force=True)
    return folder


def _common(plan: Plan, model: Path) -> list[str]:
    lora = [f"--model.policy.lora.r={plan.lora}"] if plan.lora else ["--model.policy.lora=null"]
    return [
        f"--model.policy.name={model}",
        *lora,
        "--trainer.logger=alignment.tracking.TrackingLogger",
        f"--trainer.logger.init_args.experiment_name={EXPERIMENT}",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.num_sanity_val_steps=0",
        f"--trainer.precision={plan.precision}",
        f"--data.batch_size={plan.batch_size}",
    ]


def train(plan: Plan, model: Path, variant: str, seed: int) -> tuple[Run, Run]:
    """(fit, test) of one variant."""
    settings = {"component_clip": None} | VARIANTS[variant]
    words = [
        *_common(plan, model),
        "--trainer.callbacks=callbacks.Checkpoint",
        "--model.domains=null",
        f"--model.optim.lr={plan.lr}",
        "--model.optim.warmup_steps=3",
        "--model.micro_batch_tokens=2048",
        f"--seed_everything={seed}",
        f"--data.path={plan.data}",
        f"--data.max_rows={plan.rows}",
        f"--data.max_eval_rows={plan.eval_rows}",
        f"--data.val_fraction={plan.val_fraction}",
        *(f"--model.{name}={json.dumps(value).strip(chr(34))}" for name, value in settings.items()),
    ]
    config, name = str(REPOSITORY / "configs/generalized_rpo"), f"{variant}-{seed}"
    fit = alignment("fit", config, name, *words, experiment=EXPERIMENT)
    end = f"--ckpt_path={fit.checkpoint}"
    return fit, alignment("test", config, f"{name}, test", *words, end, experiment=EXPERIMENT)


# ---------------------------------------------------------------------- the model's own words


@torch.no_grad()
def own_words(plan: Plan, checkpoint: Path) -> dict[str, float]:
    """Measures on sampled replies to held-out prompts, the same keys for every variant and seed."""
    module = GeneralizedRPO.load_from_checkpoint(checkpoint)
    tokenizer = module.tokenizer
    data = PreferenceData(
        plan.data, tokenizer=tokenizer, cache_dir=None, max_rows=plan.rows, val_fraction=plan.val_fraction
    )
    prompts: dict[tuple[int, ...], Group] = {}
    for group in data.groups("test"):
        prompts.setdefault(tuple(group.prompt), group)
    asked = list(prompts.values())[: plan.prompts]
    ends = stop_ids_of(tokenizer, module.policy, end_ids(tokenizer, None))
    rollout = LocalRollout(module.policy, pad_id=tokenizer.pad_token_id, stop_ids=ends, max_batch_tokens=16384)
    with evaluating(module.policy):
        drawn = rollout.generate(asked, plan.samples, SamplingConfig(max_tokens=plan.max_tokens), seed=0, step=0)
        measures = _of_tokens(module, drawn.batch)
    texts = [
        tokenizer.decode(ids.tolist(), skip_special_tokens=True).strip()
        for ids in torch.split(drawn.batch.completion_ids, drawn.batch.completion_lengths.tolist())
    ]
    said = [texts[i : i + plan.samples] for i in range(0, len(texts), plan.samples)]
    for n in (1, 2):
        measures[f"distinct_{n}"] = statistics.mean(distinct(replies, n) for replies in said)
    measures["self_bleu"] = self_bleu(said)
    measures["length"] = float(drawn.batch.completion_lengths.double().mean())
    if plan.data == "world:support":
        judged = [(text, group.columns) for group, replies in zip(asked, said, strict=True) for text in replies]
        measures["right"] = statistics.mean(float(world.right(text, columns)) for text, columns in judged)
        measures["warmth"] = statistics.mean(world.warmth(text) for text, _ in judged)
    return measures


def _of_tokens(module: GeneralizedRPO, batch: GroupBatch) -> dict[str, float]:
    entropy, jumps, tokens, pairs = 0.0, 0.0, 0, 0
    for micro in batch.split(4096, keep_groups=False):
        stats = module.engine(micro, entropy=True)
        assert stats.logps is not None
        assert stats.entropy is not None
        normalised = normalised_entropy(stats.entropy, module.vocabulary)
        entropy += float(stats.entropy.double().sum())
        jumps += float(smooth_values("probability", micro, stats.logps, normalised).double().sum())
        tokens += int(micro.scored.sum())
        pairs += int(neighbours(micro).sum())
    return {"entropy_own": entropy / max(tokens, 1), "smooth_own": jumps / max(pairs, 1)}


# ---------------------------------------------------------------------- the study


def measure(plan: Plan, model: Path, variant: str, seed: int) -> dict[str, float]:
    """All measures of one run, from its file where it has been done."""
    file = Path("done") / f"{variant}-{seed}.json"
    asked = {"plan": asdict(plan), "settings": VARIANTS[variant]}
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["asked"] == asked:
            return kept["measures"]
    fit, tested = train(plan, model, variant, seed)
    measures = {name: tested.last(path) for name, path in TESTED.items() if _has(tested, path)}
    kind = VARIANTS[variant].get("smoothness", "probability")
    if kind == "probability":
        measures["smooth"] = tested.last("test/loss/smooth")
    measures |= own_words(plan, fit.checkpoint) | {"seconds": fit.seconds}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"asked": asked, "measures": measures}, indent=1), encoding="utf-8")
    return measures


def _has(run: Run, path: str) -> bool:
    return bool(run.curve(path))


def study(plan: Plan, variants: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Every variant with every seed, in the current folder."""
    model, where, began = start(plan), machine(), time.monotonic()
    found = {v: {str(seed): measure(plan, model, v, seed) for seed in seeds} for v in variants}
    return {
        "machine": where,
        "plan": asdict(plan) | {"model": Path(plan.model).name, "data": Path(plan.data).name},
        "variants": {v: VARIANTS[v] for v in variants},
        "seeds": list(seeds),
        "runs": found,
        "seconds": time.monotonic() - began,
    }


# ---------------------------------------------------------------------- the report


def differences(found: Mapping[str, Any], variant: str, name: str) -> list[float]:
    """The measure's difference from DPO, one for each seed."""
    ours, theirs = found["runs"][variant], found["runs"][BASELINE]
    return [ours[seed][name] - theirs[seed][name] for seed in ours if name in ours[seed] and name in theirs[seed]]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % of Student's t around the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def clear(values: Sequence[float]) -> bool:
    """Whether the interval leaves 0 out."""
    found = interval(values)
    return found is not None and (found[0] > 0 or found[1] < 0)


def signed(value: float) -> str:
    """With three decimals, or as a power of ten where those would be zeros."""
    return f"{value:+.3f}" if value == 0 or abs(value) >= 5e-4 else f"{value:+.0e}"


def report(numbers: Mapping[str, Mapping[str, Any]]) -> str:
    """The Markdown page, of what was found on each data."""
    lines = ["# GeneralizedRPO: what its terms buy and what they cost", ""]
    return "\n".join([*lines, *(line for found in numbers.values() for line in section(found))])


def section(found: Mapping[str, Any]) -> list[str]:
    """What was found on one data."""
    plan, seeds, variants = found["plan"], found["seeds"], list(found["variants"])
    names = list(dict.fromkeys(n for v in variants for n in next(iter(found["runs"][v].values()))))
    lines = [f"## {plan['data']}", "", f"`{found['command']}` on {found['machine']}.", ""]
    sft = f" after SFT on {plan['sft_rows']} rows of the built-in world" if plan["sft_rows"] else ""
    lines += [
        f"The first {plan['rows']} pairs, one epoch in batches of {plan['batch_size']}, {plan['model']}{sft}, "
        f"LoRA of rank {plan['lora']}, learning rate {plan['lr']:g}, {plan['precision']}; {len(seeds)} seeds. "
        f"Sampled: {plan['samples']} replies to each of "
        f"{plan['prompts']} held-out prompts, temperature 1. What each measure is: `benchmarks/generalized_rpo.py`.",
        "",
    ]
    rows = [[v, *(_cell(found, v, n, _mean) for n in names)] for v in variants]
    lines += ["Mean ± standard deviation over seeds:", "", *table(["variant", *names], rows), ""]
    others = [v for v in variants if v != BASELINE]
    if BASELINE in variants and others:
        rows = [[v, *(_cell(found, v, n, _difference) for n in names)] for v in others]
        lines += ["Difference from DPO, paired by seed; **bold** where its 95 % interval leaves 0 out:", ""]
        lines += [*table(["variant", *names], rows), "", *_verdicts(found, others, names)]
    settings = [
        f"- `{v}`: {json.dumps(own) if own else 'the defaults of the class'}" for v, own in found["variants"].items()
    ]
    return [*lines, "Settings:", "", *settings, ""]


def _cell(found: Mapping[str, Any], variant: str, name: str, show: Callable[..., str]) -> str:
    return show(found, variant, name) if name in next(iter(found["runs"][variant].values())) else ""


def _mean(found: Mapping[str, Any], variant: str, name: str) -> str:
    return spread([run[name] for run in found["runs"][variant].values()])


def _difference(found: Mapping[str, Any], variant: str, name: str) -> str:
    values = differences(found, variant, name)
    if not values:
        return ""
    text = signed(statistics.mean(values))
    return f"**{text}**" if clear(values) else text


def _verdicts(found: Mapping[str, Any], variants: Sequence[str], names: Sequence[str]) -> list[str]:
    """One line a variant, made of what is clear and of nothing else."""
    lines = []
    for v in variants:
        kinds: dict[str, list[str]] = {"better": [], "worse": [], "moved": []}
        for name in names:
            values = differences(found, v, name)
            if name != "seconds" and clear(values):
                sign = DIRECTION.get(name, 0) * statistics.mean(values)
                kind = "moved" if sign == 0 else "better" if sign > 0 else "worse"
                kinds[kind].append(f"{name} {signed(statistics.mean(values))}")
        told = "; ".join(f"{kind}: {', '.join(parts)}" for kind, parts in kinds.items() if parts)
        lines.append(f"- `{v}`: {told or 'no difference from DPO that the seeds make clear'}.")
    return [*lines, ""]


def _command(options: Mapping[str, Any], variants: Sequence[str], plan: Mapping[str, Any]) -> str:
    """What to type for these figures."""
    words = ["python -m benchmarks.generalized_rpo --work FOLDER"]
    if len(variants) < len(VARIANTS):
        words.append("--variants " + " ".join(f"'{v}'" if " " in v else v for v in variants))
    words.append("--seeds " + " ".join(map(str, options["seeds"])))
    fields = Plan.__dataclass_fields__
    changed = {name: plan[name] for name in fields if name != "model" and plan[name] != fields[name].default}
    return " ".join([*words, *(f"--{name.replace('_', '-')} {value}" for name, value in changed.items())])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generalized_rpo", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and figures")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "smollm2", help="where all start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "reports", help="folder of the report")
    for name, field in Plan.__dataclass_fields__.items():
        if name != "model":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args(argv))
    own = {name: options[name] for name in Plan.__dataclass_fields__ if name != "model"}
    plan = Plan(model=str(options["model"].resolve()), **own)
    if plan.data != "world:support" and Path(plan.data).is_file():
        plan = Plan(**(asdict(plan) | {"data": str(Path(plan.data).resolve())}))
    out = options["out"].resolve()
    variants = [v for v in VARIANTS if v in options["variants"]]
    with working_in(options["work"]):
        found = study(plan, variants, options["seeds"])
    found["command"] = _command(options, variants, found["plan"])
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "generalized_rpo.json"
    numbers = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    numbers[found["plan"]["data"]] = found
    kept.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    (out / "generalized_rpo.md").write_text(report(numbers), encoding="utf-8")
    print(f"written: {out / 'generalized_rpo.md'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
