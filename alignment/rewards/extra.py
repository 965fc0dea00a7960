"""Packages of the extra `rewards`: imported by who uses them, and missed in one line."""

from __future__ import annotations

import importlib
from typing import Any

from alignment.errors import UserError


def needed(module: str, package: str) -> Any:
    """The module `module` of the distribution `package`. Raises UserError where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{package} is missing: pip install 'lightning-alignment[rewards]' ({error})") from error
