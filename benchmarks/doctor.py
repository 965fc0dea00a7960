"""`python -m benchmarks.doctor [RUN ...]`: what the doctor says of runs made to show a fault, and of healthy ones.

    faults             the runs of `benchmarks.doctor_faults`: the tiny model, two to ten seconds each
    healthy_dpo        the tiny model on the preference pairs of the built-in world: configs/dpo.yaml
    healthy_grpo       a tiny model sorts letters: the quickstart's GRPO from its SFT start
    healthy_ppo        the same task for PPO: benchmarks/online/tiny_ppo.yaml from its SFT start
    hacked_sentiment   GRPO of the TinyStories model on a lexicon's sentiment alone, which ends as "friend friend
                       friend": benchmarks/online/stories.yaml

Which rule fires on which run goes to reports/doctor.json and reports/doctor.md; runs that are not made again keep what
was found before. Exit status 1 where a rule is silent on its fault or speaks on a healthy run. About seven minutes of
one CPU core. hacked_sentiment needs `--data`, the folder with the TinyStories model, and the package vaderSentiment.

`--keep` writes what the last four have logged to tests/data/NAME.json, with the command, in five significant digits and
without names that no rule reads: tests examine it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from alignment import runs
from alignment.diagnosis import IGNORED, Examination
from alignment.diagnosis_rules import NAMES
from alignment.diagnosis_source import of_folder
from alignment.doctor_command import examine
from alignment.errors import UserError
from alignment.quickstart_grpo import EXPERIMENT as QUICKSTART
from alignment.quickstart_grpo import run as quickstart
from benchmarks.doctor_faults import EVERY, FAULTS
from benchmarks.online import stories, tiny
from benchmarks.online.bench import alignment, machine, working_in

REPOSITORY = Path(__file__).resolve().parents[1]
OUT = REPOSITORY / "tests" / "data"
REPORT = REPOSITORY / "reports" / "doctor.json"
EACH = "--trainer.log_every_n_steps=1"


def healthy_dpo(data: Path) -> Path:
    words = ("--trainer.val_check_interval=8", "--trainer.logger.experiment_name=online")
    return alignment("fit", str(REPOSITORY / "configs" / "dpo"), "dpo", *words, EACH).folder


def healthy_grpo(data: Path) -> Path:
    quickstart("tiny", Path(), 60, Console(quiet=True))
    return next(runs.find_runs(Path.cwd(), QUICKSTART, run_name="grpo_tiny"))[0]


def healthy_ppo(data: Path) -> Path:
    tiny.make_start()
    return alignment("fit", "tiny_ppo", "ppo", "--trainer.max_steps=180", "--trainer.val_check_interval=6", EACH).folder


def hacked_sentiment(data: Path) -> Path:
    stories.make_model(data, Path("stories260K").resolve())
    stories.write_prompts(Path())
    Path("my_rewards.py").write_text(stories.REWARDS)
    return alignment("fit", "stories", "alone", "--trainer.max_steps=40", EACH).folder


RUNS: dict[str, Callable[[Path], Path]] = {
    run.__name__: run for run in (healthy_dpo, healthy_grpo, healthy_ppo, hacked_sentiment)
}
"""Name -> a run of a real task, whose folder it returns."""
WHAT = {
    "healthy_dpo": "DPO of the tiny model: configs/dpo.yaml",
    "healthy_grpo": "GRPO of a tiny model that sorts letters: the quickstart",
    "healthy_ppo": "PPO on the same task: benchmarks/online/tiny_ppo.yaml",
    "hacked_sentiment": "GRPO of the TinyStories model on a lexicon's sentiment alone",
}
SHOWS = {"hacked_sentiment": ("reward_hacking", "entropy_collapse", "kl_runaway", "repetition")}
"""Name -> rules that must give an alarm; no rule may on the others."""


def keep(folder: Path, name: str) -> Path:
    """Write what a run has logged; the file."""
    rows = [
        [step, {k: float(f"{v:.5g}") for k, v in sorted(values.items()) if not k.startswith(IGNORED)}]
        for step, values in of_folder(folder).rows
    ]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows if row[1])
    path = OUT / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    command = f"python -m benchmarks.doctor --data FOLDER --keep {name}"
    path.write_text(f'{{"command": {json.dumps(command)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    return path


# ---------------------------------------------------------------------- one run


def made(name: str, work: Path, data: Path, keeps: bool) -> dict[str, Any]:
    """Make a run and say what the doctor saw: what the report holds of it."""
    started = time.monotonic()
    if name in FAULTS:
        fault = FAULTS[name]
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        seen, shows, what = fault.run(folder), fault.shows, fault.what
        missed = fault.missed(seen)
    else:
        with working_in(work / name):
            folder = RUNS[name](data)
        if keeps:
            print(keep(folder, name))
        seen, shows, what = examine(of_folder(folder), EVERY), SHOWS.get(name, ()), WHAT[name]
        missed = _missed(seen, shows)
    return {
        "what": what,
        "shows": list(shows),
        "fired": [rule for rule in NAMES if rule in {alarm.rule for alarm in seen.alarms}],
        "missed": missed,
        "rows": seen.rows,
        "seconds": round(time.monotonic() - started),
        "alarms": [{"rule": alarm.rule, "since": alarm.since, "line": alarm.line()} for alarm in seen.alarms],
    }


def _missed(seen: Examination, shows: tuple[str, ...]) -> str:
    """What is not as it must be in a run of a real task; "" for nothing. A healthy one has no alarm at all."""
    fired = {alarm.rule for alarm in seen.alarms}
    silent, more = sorted(set(shows) - fired), [] if shows else sorted(fired)
    told = [("no alarm", silent), ("alarms of a healthy run", more)]
    return "; ".join(f"{words}: {', '.join(rules)}" for words, rules in told if rules)


# ---------------------------------------------------------------------- the report


def page(found: Mapping[str, Mapping[str, Any]], where: str) -> str:
    """The report as Markdown."""
    names = [name for name in (*FAULTS, *reversed(RUNS)) if name in found]
    shown = {rule for one in found.values() for rule in one["shows"] if rule in one["fired"]}
    healthy = [name for name in names if not found[name]["shows"]]
    alarms = sum(len(found[name]["fired"]) for name in healthy)
    lines = [
        "# What the doctor sees",
        "",
        f"Command: `python -m benchmarks.doctor --data FOLDER`. Machine: {where}.",
        "",
        f"{len(shown)} of {len(NAMES)} rules fire on a run made to show their fault. {len(healthy)} healthy runs give "
        f"{alarms or 'no'} alarms. A look at every {EVERY}th logged row, and every row logged.",
        "",
        "## Rule by run",
        "",
        "`●` fired, as it must. `○` fired besides: a fault seldom comes alone. `✗` should have, or should not. "
        "Empty: silent. Runs are numbered as below; those without a fault come last.",
        "",
        *_table(["rule", *(str(i + 1) for i in range(len(names)))], [_marks(rule, names, found) for rule in NAMES]),
        "",
        "## Runs",
        "",
        "| | run | what is wrong in it | rows | seconds | not as it must be |",
        "|---:|---|---|---:|---:|---|",
    ]
    for i, name in enumerate(names):
        one = found[name]
        what = one["what"] if one["shows"] else f"nothing: {one['what']}"
        lines.append(f"| {i + 1} | `{name}` | {what} | {one['rows']} | {one['seconds']} | {one['missed']} |")
    lines += ["", "## What it said", "", "The first alarm of each rule that had to give one, by run.", ""]
    for name in names:
        for alarm in _firsts(found[name]):
            lines.append(f"- `{name}`, step {alarm['since']}: {alarm['line']}")
    return "\n".join(lines) + "\n"


def _firsts(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The first alarm of each rule that must give one."""
    by_rule = {alarm["rule"]: alarm for alarm in reversed(one["alarms"])}
    return [by_rule[rule] for rule in one["shows"] if rule in by_rule]


def _marks(rule: str, names: list[str], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row of the table: the rule, and its mark for each run."""
    marks = {(True, True): "●", (True, False): "✗", (False, False): ""}
    cells = []
    for name in names:
        one = found[name]
        due, fired = rule in one["shows"], rule in one["fired"]
        cells.append(marks.get((due, fired), "○" if one["shows"] else "✗"))
    return [f"`{rule}`", *cells]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    between = "|---|" + ":-:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", between, *(f"| {' | '.join(row)} |" for row in rows)]


def _known() -> dict[str, Any]:
    """What an earlier call has found."""
    return json.loads(REPORT.read_text(encoding="utf-8"))["runs"] if REPORT.is_file() else {}


def _write(found: Mapping[str, Any], where: str) -> None:
    REPORT.write_text(json.dumps({"machine": where, "runs": found}, indent=1) + "\n", encoding="utf-8")
    REPORT.with_suffix(".md").write_text(page(found, where), encoding="utf-8")


# ---------------------------------------------------------------------- the command


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Within, what many small runs would say many times is not said."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 when a run cannot be made, with one line on stderr, or is not seen as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*FAULTS, *RUNS]
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"faults, or {', '.join(known)} (default: all)")
    parser.add_argument("--data", type=Path, help="folder with stories260K.bin and its conversion")
    parser.add_argument("--work", type=Path, default=Path("doctor_runs"), help="working folder (default: doctor_runs)")
    parser.add_argument("--keep", action="store_true", help="write the logs of real tasks to tests/data")
    options = parser.parse_args(argv)
    names = [n for given in options.names for n in (FAULTS if given == "faults" else [given])]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no run {', '.join(unknown)}; there are faults, {', '.join(known)}")
    if options.data is None and "hacked_sentiment" in names:
        parser.error("hacked_sentiment needs --data, the folder with the TinyStories model")
    names = names or [name for name in known if name != "hacked_sentiment" or options.data is not None]
    torch.set_num_threads(1)  # the matrices are too small to share
    found, where = _known(), machine()
    work, data = options.work.resolve(), (options.data or Path()).resolve()
    try:
        for name in names:
            with _quietly():
                found[name] = made(name, work, data, options.keep)
            print(f"{name}: {', '.join(found[name]['fired']) or 'no alarm'}  {found[name]['missed']}", flush=True)
            _write(found, where)
    except UserError as error:
        print(f"benchmarks.doctor: {error}", file=sys.stderr)
        return 1
    return int(any(found[name]["missed"] for name in names))


if __name__ == "__main__":
    sys.exit(main())
