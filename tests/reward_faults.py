"""Rewards that fail in every way, for tests of their supervision. Imported by reward workers: no torch here.

Each scores a completion by its number of characters, except for "bad", which meets the fault.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

FOREVER = 3600


class Odd(BaseException):
    """Not an Exception."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Sluggish:
    """A number that takes its time."""

    def __float__(self) -> float:
        time.sleep(FOREVER)
        return 1.0


def throw(error: BaseException) -> Any:
    raise error


def spin() -> None:
    while True:
        pass


def deaf() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(FOREVER)


def hoard() -> list[bytearray]:
    held = []
    while True:
        held.append(bytearray(16 << 20))


def recurse() -> None:
    recurse()


def orphan() -> None:
    """Leave a process behind that holds everything open."""
    if os.fork() == 0:
        time.sleep(FOREVER)
    os._exit(1)


def fork_twice() -> float:
    """Come back from the call in two processes."""
    os.fork()
    return 3.0


FAULTS: dict[str, tuple[str | None, Callable[[], Any]]] = {
    "raise": ("raise", lambda: throw(ValueError("no"))),
    "interrupt": ("raise", lambda: throw(KeyboardInterrupt())),
    "odd_exception": ("raise", lambda: throw(Odd("odd"))),
    "broken_text": ("raise", lambda: throw(Unspeakable())),
    "huge_text": ("raise", lambda: throw(ValueError("\udcff" * 5_000_000))),
    "recursion": ("raise", recurse),
    "asks": ("raise", input),
    "exit": ("exit", lambda: sys.exit(0)),
    "os_exit": ("crash", lambda: os._exit(0)),
    "segfault": ("crash", lambda: ctypes.string_at(0)),
    "abort": ("crash", os.abort),
    "sigkill": ("crash", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "orphan": ("crash", orphan),
    "closed": ("crash", lambda: os.closerange(3, 256)),
    "sleep": ("timeout", lambda: time.sleep(FOREVER)),
    "spin": ("timeout", spin),
    "deaf": ("timeout", deaf),
    "stopped": ("timeout", lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "sluggish": ("timeout", Sluggish),
    "memory": ("memory", hoard),
    "fork_twice": (None, fork_twice),
    "text": ("type", lambda: "1.0"),
    "nan": ("nan", lambda: float("nan")),
    "infinity": ("inf", lambda: float("-inf")),
    "beyond": ("inf", lambda: 10**400),
}
"""name -> (kind it is counted as, what happens)"""

VALUES = ("sluggish", "fork_twice", "text", "nan", "infinity", "beyond")
"""Faults that return something."""


class Single:
    """One completion at a time."""

    def __init__(self, fault: str) -> None:
        self.fault = FAULTS[fault][1]

    def __call__(self, completion: str) -> Any:
        return self.fault() if completion == "bad" else len(completion)


class Batch:
    """All completions at once."""

    def __init__(self, fault: str) -> None:
        self.fault = FAULTS[fault][1]

    def __call__(self, completions: list[str]) -> list[Any]:
        return [self.fault() if c == "bad" else len(c) for c in completions]


class Tally:
    """Hangs on "bad", after adding a line to a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, completion: str) -> int:
        if completion == "bad":
            with open(self.path, "a") as file:
                file.write("called\n")
            time.sleep(FOREVER)
        return len(completion)


def length(completion: str) -> int:
    return len(completion)


def lengths(completions: list[str]) -> list[int]:
    return [len(c) for c in completions]


class Returns:
    """A batch reward that returns what it was told to, evaluated here."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __call__(self, completions: list[str]) -> Any:
        return eval(self.expression)
