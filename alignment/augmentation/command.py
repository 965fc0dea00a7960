"""`alignment data augment FILE OUT`: adversarial rows, paraphrased prompts, or difficulties; see docs/augment.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.data_options import Names, Parser
from alignment.errors import UserError

MODES = ("adversarial", "expand", "grade")
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "adversarial": ("share", "attacks", "rejected", "max_payload"),
    "expand": ("share", "candidates", "paraphrase", "embedding", "clusters", "quantile", "similarity"),
    "grade": ("model", "samples", "success", "difficulty", "rates", "column", "max_prompt_tokens"),
}
"""Mode -> options that belong to it; their defaults are those of its configuration class."""
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "adversarial": (),
    "expand": ("sampling", "policy"),
    "grade": ("rewards", "sampling", "scoring", "policy", "success"),
}
"""Mode -> what a configuration file and dotted flags may set for it."""


def main(argv: Sequence[str]) -> int:
    """Returns 0; raises UserError for what cannot be done, and the command line prints that as one line."""
    from alignment.augmentation import settings as dotted

    given, words = dotted.take(argv)
    options = vars(_parser().parse_args(words))
    mode = options.pop("mode", MODES[0])
    _check_belongs(mode, options, given)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # rewards of the user's own, as in a run
    from alignment.augmentation.run import run

    run(mode, options, given)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="alignment data augment",
        description="Add adversarial rows (5 %) or paraphrased prompts to a file, or grade its prompts by a model.",
        epilog="alignment data augment rows.jsonl more.jsonl --share 0.05",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("file", help="what to read, as data.path: a file, a folder, a hub id, world:support")
    parser.add_argument("out", type=Path, help="what to write; ends with .jsonl or .parquet")
    parser.add_argument("--mode", choices=MODES, help="what to do (default: adversarial)")
    parser.add_argument("--seed", type=int, help="of every choice; the same gives the same file (default: 0)")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    source = parser.add_argument_group("reading, as in a run's data section")
    source.add_argument("--purpose", help="preference, unpaired, supervised or prompts (default: what the columns fit)")
    source.add_argument("--columns", help="our names for the file's columns: '{prompt: question, chosen: better}'")
    source.add_argument("--split", help="of a hub data set (default: train)")
    source.add_argument("--config_name", help="configuration of a hub data set")
    source.add_argument("--max_rows", type=int, help="read only the first rows")
    source.add_argument("--on_bad_row", choices=("skip", "stop"), help="drop bad rows and count them, or stop at one")
    _mode_options(parser)
    tracking = parser.add_argument_group("tracking")
    tracking.add_argument("--root", type=Path, help="folder of mlflow.db and `runs` (default: here)")
    tracking.add_argument("--tracking_uri", help="another MLflow")
    tracking.add_argument("--no_tracking", action="store_true", help="record nothing")
    return parser


def _mode_options(parser: argparse.ArgumentParser) -> None:
    both = parser.add_argument_group("modes adversarial and expand")
    both.add_argument("--share", type=float, help="adversarial rows of all rows written; new prompts for each prompt")
    first = parser.add_argument_group("mode adversarial")
    first.add_argument("--attacks", action=Names, help="kinds, separated by commas (default: all)")
    first.add_argument("--rejected", choices=("obeyed", "kept"), help="of pairs: the reply that obeys, or as it was")
    first.add_argument("--max_payload", type=int, help="characters of the longest injected task")
    second = parser.add_argument_group("mode expand; --sampling.* and --policy.* as in a run")
    second.add_argument("--paraphrase", help="rule, or a causal language model")
    second.add_argument("--embedding", help="lsa, or a sentence-transformers model")
    second.add_argument("--candidates", type=int, help="paraphrases tried for a prompt")
    second.add_argument("--clusters", type=int, help="how many (default: sqrt(prompts / 2))")
    second.add_argument("--quantile", type=float, help="of distances in a cluster; a new prompt may be that far out")
    second.add_argument("--similarity", type=float, help="share of common pieces that makes a near duplicate")
    third = parser.add_argument_group("mode grade; -c FILE, --{rewards,sampling,scoring,policy}.* as in a run")
    third.add_argument("--model", help="hub id, folder, checkpoint, run, last or best")
    third.add_argument("--samples", type=int, help="answers to each prompt")
    third.add_argument("--success", help="the reward that measures success (default: the first)")
    third.add_argument("--difficulty", choices=("name", "number"), help="easy, medium, hard; or 1 - success rate")
    third.add_argument("--rates", type=_numbers, help="falling success rates that part the names, such as 0.7,0.3")
    third.add_argument("--column", help="where the difficulty is written")
    third.add_argument("--max_prompt_tokens", type=int, help="longer prompts are cut on the left, as in training")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers such as 0.7,0.3") from error


def _check_belongs(mode: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UserError for an option of another mode, which would do nothing."""
    for name in sorted({name for names in _OPTIONS.values() for name in names} & options.keys()):
        if name not in _OPTIONS[mode]:
            owners = " or ".join(owner for owner, names in _OPTIONS.items() if name in names)
            raise UserError(f"--{name} belongs to --mode {owners}, and this is --mode {mode}")
    if unused := sorted(given.keys() - set(_SETTINGS[mode])):
        owners = " or ".join(owner for owner, names in _SETTINGS.items() if unused[0] in names)
        raise UserError(f"{unused[0]} belongs to --mode {owners}, and this is --mode {mode}")
