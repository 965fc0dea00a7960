"""`alignment data check | augment`: what is done to rows before a run reads them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from alignment.cli_errors import CommandLineError, suggest

COMMANDS = {
    "check": ("alignment.quality.command", "how good rows are, and which are at fault: alignment data check FILE"),
    "augment": ("alignment.augmentation.command", "more and harder prompts, graded: alignment data augment FILE OUT"),
}
"""name -> (module whose `main(argv)` runs it, one line of help)"""


def main(argv: Sequence[str]) -> int:
    """Returns what the command returns; raises CommandLineError where there is none of that name."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: alignment data COMMAND [options]\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()))
        print("\nalignment data COMMAND --help    its options")
        return 0
    if argv[0] not in COMMANDS:
        meant = suggest(argv[0], COMMANDS)
        hint = f"did you mean '{meant}'?" if meant else f"there are {', '.join(COMMANDS)}"
        raise CommandLineError(f"no command '{argv[0]}' of data; {hint}")
    return int(importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]))
