"""`python -m benchmarks.multi_reward [PART ...]`: methods for several rewards compared on TriConflict.

    table        every method and every ablation, ten seeds by default         150 runs
    sensitivity  every method over a grid of settings, a third of the seeds    240 runs
    variants     four methods, three forms of the task, four settings, a seed   40 runs
    fronts       what a grid of preferences gives, by training and by a dial    70 runs
    study        DecoupledPO with one thing changed                             70 runs
    language     the table again with a language model, three seeds             45 runs
    language-dial  DecoupledPO there with its dial turned                        3 runs

The last two need `--model FOLDER`, the TinyStories model (shared data of the project, or
huggingface.co/karpathy/tinyllamas, stories260K).

Without a part all of them. A run takes about 15 s of one CPU core; two go side by side. What is finished is kept in the
working folder, so a second call goes on where the first one ended. Numbers go to reports/multi_reward.json, tables to
reports/multi_reward.md and README.md, pictures to docs/images. `--draw` only does the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from alignment.cli_errors import one_line
from alignment.errors import UserError
from benchmarks.multi_reward import collapse, plan, report, support
from benchmarks.multi_reward.methods import METHODS, SOUPS
from benchmarks.multi_reward.runs import Job, make
from benchmarks.multi_reward.tasks import TASKS
from benchmarks.online.bench import machine
from benchmarks.online.report import put_block

SEEDS = 10
PAGE, IMAGES, README = Path("reports/multi_reward.md"), Path("docs/images"), Path("README.md")
COMMAND = "python -m benchmarks.multi_reward"

Found = Mapping[str, Mapping[str, Any]]


def _kept(found: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A run's numbers as the report keeps them."""
    rewards = {name: [round(v, 5) for v in values] for name, values in found["rewards"].items()}
    curves = {name: [[x, round(v, 4)] for x, v in curve] for name, curve in found["curves"].items()}
    seconds = {name: round(found[name], 1) for name in ("seconds", "cpu_seconds")}
    return {"seed": seed, "rewards": rewards, "curves": curves, **seconds}


def measure_table(run: Callable[[Sequence[Job]], Found], seeds: Sequence[int]) -> dict[str, Any]:
    found = run(plan.table_jobs(seeds))
    return {m: [_kept(found[f"{m}-{seed}"], seed) for seed in seeds] for m in METHODS}


def measure_sensitivity(run: Callable[[Sequence[Job]], Found], seeds: Sequence[int]) -> dict[str, Any]:
    some = plan.share(seeds, plan.GRID_SHARE)
    found = run(plan.grid_jobs(some))
    return {
        m: {
            cell: [{**_kept(found[f"{m}-cell{i}-{seed}"], seed), "curves": {}} for seed in some]
            for i, cell in enumerate(plan.CELLS)
        }
        for m in plan.FULL
        if m != SOUPS
    }


def measure_variants(run: Callable[[Sequence[Job]], Found], seeds: Sequence[int]) -> dict[str, Any]:
    some = seeds[: plan.VARIANT_SEEDS]
    found = run(plan.variant_jobs(some))

    def kept(*place: str) -> list[dict[str, Any]]:
        return [{**_kept(found[plan.variant_name(*place, seed)], seed), "curves": {}} for seed in some]

    return {m: {v: {s: kept(m, v, s) for s in plan.SETTINGS} for v in plan.VARIANTS} for m in plan.VARIED}


def measure_study(run: Callable[[Sequence[Job]], Found], seeds: Sequence[int]) -> dict[str, Any]:
    some = plan.share(seeds, plan.STUDY_SHARE)
    found = run(plan.study_jobs(some))
    return {
        title: [{**_kept(found[f"study{i}-{seed}"], seed), "curves": {}} for seed in some]
        for i, title in enumerate(plan.STUDY)
    }


def measure_fronts(run: Callable[[Sequence[Job]], Found], seeds: Sequence[int]) -> dict[str, Any]:
    some = plan.share(seeds, plan.FRONT_SHARE)
    soups = [Job(name=f"{SOUPS}-{seed}", method=SOUPS, seed=seed) for seed in some]
    found = run([*plan.front_jobs(some), *plan.dial_jobs(seeds), *soups])

    def end(name: str) -> dict[str, Any]:
        return {"rewards": {reward: values[-1] for reward, values in found[name]["rewards"].items()}}

    fronts: dict[str, Any] = {
        "DecoupledPO, the dial": {
            "runs": 1,
            "points": [found[f"dial-{seed}"]["dial"] for seed in seeds],
            "training": [found[f"dial-{seed}"]["training_dial"] for seed in seeds],
        },
        "Rewarded Soups": {"runs": 3, "points": [found[f"{SOUPS}-{seed}"]["dial"] for seed in some]},
    }
    count = sum(job.method == "gdpo" for job in plan.front_jobs(some[:1]))
    for m in plan.TRAINED_FRONTS:
        sets = [[end(f"{m}-front{i}-{seed}") for i in range(count)] for seed in some]
        fronts[f"{METHODS[m].title}, trained at each preference"] = {"runs": count, "points": sets}
    return fronts


def measure_language(run: Callable[[Sequence[Job]], Found], seeds: Sequence[int]) -> dict[str, Any]:
    found = run(plan.language_jobs())
    some = range(plan.LANGUAGE_SEEDS)
    return {m: [_kept(found[f"support-{m}-{seed}"], seed) for seed in some] for m in METHODS}


def measure_language_dial(run: Callable[[Sequence[Job]], Found], seeds: Sequence[int]) -> dict[str, Any]:
    found = run(plan.language_dial_jobs())
    return {
        "points": [numbers["dial"] for numbers in found.values()],
        "training": [numbers["training_dial"] for numbers in found.values()],
    }


PARTS = {
    "table": measure_table,
    "sensitivity": measure_sensitivity,
    "variants": measure_variants,
    "fronts": measure_fronts,
    "study": measure_study,
    "language": measure_language,
    "language-dial": measure_language_dial,
}


def show(numbers: Mapping[str, Any], page: Path, images: Path) -> None:
    """Every part that there are numbers of."""
    parts, where = numbers["parts"], numbers["machine"]
    rows = report.rows_of(parts)

    def block(part: str, lines: list[str]) -> None:
        put_block(page, part, ["", f"`{COMMAND} {part}` on {where[part]}.", "", *lines, ""], report.TITLE)

    if "table" in parts:
        report.draw_curves(parts, images / "multi_reward_curves.png")
        report.draw_mechanism(parts, images / "multi_reward_mechanism.png")
        lines = [f"TriConflict. Seeds: {len(parts['table']['gdpo'])}.", ""]
        lines += [*report.main_table(rows, ablations=False), ""]
        lines += [*report.main_table(rows, ablations=True), "", *report.paired_lines(rows, "decoupled", list(rows)), ""]
        lines += [*report.stability_table(rows), ""]
        lines += [f"![{name}](../docs/images/multi_reward_{name}.png)" for name in ("curves", "mechanism")]
        block("table", lines)
    if "sensitivity" in parts:
        seeds = len(next(iter(parts["sensitivity"]["gdpo"].values())))
        block("sensitivity", [f"Seeds: {seeds}.", "", *report.sensitivity_table(parts, rows)])
    if "variants" in parts:
        lines = [f"Seeds: {plan.VARIANT_SEEDS}.", "", *report.variants_table(parts), "", *report.variant_scores(parts)]
        block("variants", lines)
    if "fronts" in parts:
        report.draw_fronts(parts, images / "multi_reward_fronts.png")
        dial, others = parts["fronts"]["DecoupledPO, the dial"], len(parts["fronts"]["Rewarded Soups"]["points"])
        lines = [f"The dial of {len(dial['points'])} seeds, other fronts of {others}."]
        lines += ["", *report.fronts_table(parts), "", *report.dial_table(dial, parts["table"]), ""]
        block("fronts", [*lines, "![fronts](../docs/images/multi_reward_fronts.png)"])
    if "study" in parts:
        seeds = len(next(iter(parts["study"].values())))
        block("study", [f"Seeds: {seeds}.", "", *report.study_table(parts)])
    if "language" in parts:
        spoken, names = report.rows_of(parts, "language"), TASKS["support"].rewards
        half = len(report.curve(parts["language"]["gdpo"][0])) // 2
        lines = [
            f"The TinyStories model on the support world, the sentiment reward six times too large. Seeds: "
            f"{plan.LANGUAGE_SEEDS}. A score is the mean of {half} evaluations, too few for the stability to say much.",
            "",
            *report.main_table(spoken, ablations=False, rewards=names),
            "",
        ]
        lines += [*report.main_table(spoken, ablations=True, rewards=names), ""]
        block("language", [*lines, *report.paired_lines(spoken, "decoupled", list(spoken))])
    if "language-dial" in parts:
        block("language-dial", report.dial_table(parts["language-dial"], parts["language"]))
    collapse.draw(images / "advantage_collapse.png")


def into_readme(numbers: Mapping[str, Any], readme: Path) -> None:
    """Replace the table between the README's markers."""
    text = readme.read_text(encoding="utf-8")
    inner = f"<!-- multi_reward -->\n{report.readme_table(numbers['parts'])}\n<!-- end -->"
    readme.write_text(re.sub(r"<!-- multi_reward -->.*?<!-- end -->", lambda _: inner, text, flags=re.DOTALL))


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 with one line on stderr when a run failed."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; none: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the table; the other parts take fewer")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--work", type=Path, default=Path(".cache/multi_reward"), help="working folders and runs")
    parser.add_argument("--model", type=Path, help="folder of the TinyStories model, for language")
    parser.add_argument("--draw", action="store_true", help="run nothing: report and pictures from the kept numbers")
    parser.add_argument("--out", type=Path, default=PAGE, help="the report; the numbers go beside it")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.model is not None:
        os.environ[support.MODEL] = str(options.model.resolve())
    kept = options.out.with_suffix(".json")
    numbers = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"machine": {}, "parts": {}}
    transformers_logging.disable_progress_bar()
    try:
        for part in () if options.draw else options.parts or PARTS:
            where = machine()
            found = PARTS[part](lambda jobs: make(jobs, options.work, options.jobs), list(range(options.seeds)))
            numbers["machine"][part], numbers["parts"][part] = where, found
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(numbers, separators=(",", ":")) + "\n", encoding="utf-8")
    except (UserError, RuntimeError) as error:
        print(f"{COMMAND}: {one_line(str(error))}", file=sys.stderr)
        return 1
    show(numbers, options.out, IMAGES)
    into_readme(numbers, README)
    print(f"report: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
