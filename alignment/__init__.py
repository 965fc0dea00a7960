"""lightning-alignment: a Lightning-based research template for aligning language models.

Importing this package costs nothing (no torch), but checks one thing: that `modules`, `datamodules` and `callbacks`,
whose names are common, are the ones that belong to it.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

__version__ = "0.1.0"

SIBLINGS = ("modules", "datamodules", "callbacks")


def check_siblings(home: Path) -> None:
    """Raise ImportError unless each sibling package resolves inside `home`, naming what stands in its place."""
    for name in SIBLINGS:
        spec = importlib.util.find_spec(name)
        found_in = (spec.submodule_search_locations or [spec.origin or "built-in"]) if spec else []
        places = [Path(p).resolve() for p in found_in]
        if home / name in places:
            continue
        found = f"it resolves to {places[0]}" if places else "it is not there"
        raise ImportError(
            f"lightning-alignment needs its own package '{name}' at {home / name}, but {found}. "
            f"Rename or move the other '{name}', start from another folder, or reinstall lightning-alignment."
        )


check_siblings(Path(__file__).resolve().parents[1])
# When it is imported bitsandbytes asks for a kernel package that its 4-bit matrices do without.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
