"""Importing much at once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """For a block that imports: what imports make stays, and to look through it again and again for garbage, as Python
    does while objects pile up, takes a tenth of the time. What is there at the end is not looked through later either,
    if the block has imported anything."""
    collects, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) != before:
            gc.freeze()
        if collects:
            gc.enable()
