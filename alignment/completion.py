"""`alignment completion SHELL`: prints what makes the shell complete subcommands, their options and files.

    eval "$(alignment completion bash)"        in ~/.bashrc; zsh likewise in ~/.zshrc

Options are those that `alignment SUBCOMMAND --help` lists; they are asked for once for each version and kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from alignment import __version__
from alignment.errors import UserError

_BASH = """_alignment() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "{subcommands}" -- "$word"))
  elif [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "$(alignment completion options "${{COMP_WORDS[1]}}" 2>/dev/null)" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _alignment alignment
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z_][\w.]*")


def main(argv: Sequence[str]) -> int:
    """Returns 0."""
    from alignment.cli import SUBCOMMANDS  # here: that module names this one

    parser = argparse.ArgumentParser(
        prog="alignment completion",
        description="Print a shell's completion of this command.",
        epilog='eval "$(alignment completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "options"), help="options: those of a subcommand")
    parser.add_argument("subcommand", nargs="?", help="with options: whose")
    given = parser.parse_args(argv)
    if given.shell == "options":
        if given.subcommand not in SUBCOMMANDS:
            raise UserError(f"there is no subcommand '{given.subcommand}'")
        print("\n".join(options(given.subcommand)))
        return 0
    script = _BASH.format(subcommands=" ".join(SUBCOMMANDS))
    print(_ZSH + script if given.shell == "zsh" else script, end="")
    return 0


def options(subcommand: str) -> list[str]:
    """Every option that its help lists, in that order."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-alignment"
    kept = folder / f"options-{subcommand}-{__version__}.txt"
    with contextlib.suppress(OSError):
        return kept.read_text(encoding="utf-8").split()
    found = list(dict.fromkeys(_OPTION.findall(_help(subcommand))))
    with contextlib.suppress(OSError):  # where nothing can be kept, it is asked for each time
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text("\n".join(found) + "\n", encoding="utf-8")
    return found


def _help(subcommand: str) -> str:
    from alignment.cli import main as run

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run([subcommand, "--help"])
    return said.getvalue()
