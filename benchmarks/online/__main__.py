"""`python -m benchmarks.online PART --data FOLDER`: real runs of GRPO and PPO by the ordinary command line.

    tiny      a tiny model sorts letters: GRPO and PPO from an SFT start, three seeds each
    stories   the TinyStories model and a sentiment reward: hacked alone, not with a KL or a second reward
    faults    a reward that raises on 1 % of its calls and hangs on 0.1 %
    smollm2   SmolLM2 on easy arithmetic: GRPO and PPO, three seeds each (hours; first `alignment fetch smollm2`)

Each runs in a working folder of its own, writes its numbers to reports/online_PART.json and its curves to
docs/images/online_PART.png, and replaces its block in reports/online.md. `--draw` only does the latter two, from the
numbers of an earlier run. The configurations lie beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from alignment.cli_errors import one_line
from alignment.errors import UserError
from benchmarks.online import faults, smollm2, stories, tiny
from benchmarks.online.bench import machine, working_in
from benchmarks.online.report import put_block

PARTS = {"tiny": tiny, "stories": stories, "faults": faults, "smollm2": smollm2}
PAGE = Path("reports/online.md")


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part; what it found, with where."""
    transformers_logging.disable_progress_bar()
    where = machine()
    data, model, work = options.data.resolve(), options.model.resolve(), options.work / part
    with working_in(work):
        if part == "smollm2":
            found = smollm2.run(data, model, options.seeds, options.only, options.words)
        else:
            found = PARTS[part].run(data)
    return {"command": f"python -m benchmarks.online {part} --data FOLDER", "machine": where, "found": found}


def show(part: str, result: dict[str, Any], page: Path) -> None:
    """The part's block on the page, and its picture."""
    found, image = result["found"], Path(f"docs/images/online_{part}.png")
    PARTS[part].picture(found, image)
    lines = ["", f"`{result['command']}` on {result['machine']}.", "", *PARTS[part].block(found)]
    if image.exists():
        lines += ["", f"![curves](../{image})"]
    put_block(page, part, [*lines, ""])
    print(f"report: {page}")


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 with one line on stderr when a part cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.online", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the public files (for stories)")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="folder of SmolLM2 (for smollm2)")
    parser.add_argument("--work", type=Path, default=Path(".cache/online"), help="working folders and runs go here")
    parser.add_argument("--draw", action="store_true", help="run nothing: report and picture from the kept numbers")
    parser.add_argument("--seeds", type=int, nargs="+", default=smollm2.SEEDS, help="for smollm2")
    parser.add_argument("--only", nargs="+", choices=smollm2.ALGORITHMS, default=smollm2.ALGORITHMS, help="for smollm2")
    parser.add_argument("--words", nargs="+", default=(), help="more words of the command line, for trials of smollm2")
    parser.add_argument("--out", type=Path, default=PAGE, help="the report; the numbers go beside it")
    options = parser.parse_args(argv)
    numbers = options.out.with_name(f"{options.out.stem}_{options.part}.json")
    try:
        if not options.draw:
            result = measure(options.part, options)
            if numbers.exists() and set(options.only) != set(smollm2.ALGORITHMS):  # the other algorithm's stay
                result["found"] = json.loads(numbers.read_text(encoding="utf-8"))["found"] | result["found"]
            numbers.parent.mkdir(parents=True, exist_ok=True)
            numbers.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        show(options.part, json.loads(numbers.read_text(encoding="utf-8")), options.out)
    except (UserError, RuntimeError) as error:
        print(f"benchmarks.online: {one_line(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
