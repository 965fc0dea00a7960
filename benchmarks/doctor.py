"""`python -m benchmarks.doctor --data FOLDER`: the real runs that the doctor is tested on, made anew.

    healthy_dpo        the tiny model on the preference pairs of the built-in world: configs/dpo.yaml
    healthy_grpo       a tiny model sorts letters: the quickstart's GRPO from its SFT start
    healthy_ppo        the same task for PPO: benchmarks/online/tiny_ppo.yaml from its SFT start
    hacked_sentiment   GRPO of the TinyStories model on a lexicon's sentiment alone, which ends as "friend friend
                       friend": benchmarks/online/stories.yaml

What they log goes to tests/data/NAME.json, with the command, in five significant digits and without names that no rule
reads. About five minutes of one CPU core. `--data` is the folder with the TinyStories model; the last run needs the
package vaderSentiment.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from alignment import runs
from alignment.diagnosis import IGNORED
from alignment.diagnosis_source import of_folder
from alignment.errors import UserError
from alignment.quickstart_grpo import EXPERIMENT as QUICKSTART
from alignment.quickstart_grpo import run as quickstart
from benchmarks.online import stories, tiny
from benchmarks.online.bench import alignment, working_in

REPOSITORY = Path(__file__).resolve().parents[1]
OUT = REPOSITORY / "tests" / "data"
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


RUNS = {run.__name__: run for run in (healthy_dpo, healthy_grpo, healthy_ppo, hacked_sentiment)}


def keep(folder: Path, name: str) -> Path:
    """Write what a run has logged; the file."""
    rows = [
        [step, {k: float(f"{v:.5g}") for k, v in sorted(values.items()) if not k.startswith(IGNORED)}]
        for step, values in of_folder(folder).rows
    ]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows if row[1])
    path = OUT / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    command = f"python -m benchmarks.doctor --data FOLDER {name}"
    path.write_text(f'{{"command": {json.dumps(command)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    return path


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 with one line on stderr when a run cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"which of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--data", type=Path, required=True, help="folder with stories260K.bin and its conversion")
    parser.add_argument("--work", type=Path, default=Path("doctor_runs"), help="working folder (default: doctor_runs)")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.names) - set(RUNS)):
        parser.error(f"no run {', '.join(unknown)}; there are {', '.join(RUNS)}")
    data = options.data.resolve()
    try:
        for name in options.names or RUNS:
            with working_in((options.work / name).resolve()):
                folder = RUNS[name](data)
            print(keep(folder, name))
    except UserError as error:
        print(f"benchmarks.doctor: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
