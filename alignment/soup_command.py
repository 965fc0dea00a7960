"""`alignment soup SOURCE... OUT`: a mixture of models that were trained on one reward each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from alignment.errors import UserError
from alignment.soup import soup


def main(argv: Sequence[str]) -> int:
    """Returns 0; raises as `soup` does, and the command line prints that as one line."""
    parser = argparse.ArgumentParser(
        prog="alignment soup",
        description="Write the weighted mean of models as a transformers folder (Rewarded Soups).",
        epilog="alignment soup models/kind models/short models/both --weights 0.3,0.7",
    )
    parser.add_argument("sources", nargs="+", help="exported folders, checkpoint folders or run folders, of one start")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--weights", help="one for each source, separated by commas, with sum 1 (default: equal)")
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    given = parser.parse_intermixed_args(argv)
    shares = soup(given.sources, given.out, _numbers(given.weights), force=given.force)
    parts = " + ".join(f"{share:g} {source}" for share, source in zip(shares, given.sources, strict=True))
    print(f"{given.out} holds {parts}; try it:  transformers chat {given.out}")
    return 0


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--weights is '{text}'; give numbers separated by commas, for example 0.3,0.7") from error
