"""Where the sandbox for programs that a model wrote does not stand, its tests are skipped; in CI they fail instead."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest

from alignment.errors import UserError
from alignment.sandbox import Sandbox


@lru_cache(maxsize=1)
def complaint() -> str:
    """Why there is no sandbox here; "" where there is one."""
    try:
        Sandbox().check()
    except UserError as error:
        return str(error)
    return ""


def need_sandbox() -> None:
    """Skip the test, or fail it where ALIGNMENT_NEEDS_SANDBOX is set, when there is no sandbox."""
    if complaint():
        skip_or_fail = pytest.fail if os.environ.get("ALIGNMENT_NEEDS_SANDBOX") else pytest.skip
        skip_or_fail(complaint())
