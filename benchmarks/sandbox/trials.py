"""R10 and R11: one try of each attack, of each benign program, and of each missing layer."""

from __future__ import annotations

import os
import socket
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from alignment.rewards.code import UnitTests
from alignment.sandbox import Limits, Sandbox
from benchmarks.sandbox.benign import BENIGN
from benchmarks.sandbox.escapes import ESCAPES
from benchmarks.sandbox.forgeries import FORGERIES, SECRET
from benchmarks.sandbox.layers import MISSING, refusal

LIMITS = Limits(timeout_s=3, memory_mb=256, disk_mb=4, output_kb=64)
SLACK_S = 2.0
"""Seconds a run may last beyond its time-out, for starting and killing it."""
MARK = "ALIGNMENT_SANDBOX_SECRET"

Try = Callable[[Path], str]


def forged(name: str, folder: Path | None = None) -> str:
    """Let a forgery be judged: "" when it scores 0."""
    settings = {"timeout_s": LIMITS.timeout_s, "memory_mb": LIMITS.memory_mb, "output_kb": LIMITS.output_kb}
    score = verdict(UnitTests(limits=settings), FORGERIES[name])
    return "" if score == 0.0 else f"{name}: scored {score}"


def verdict(reward: UnitTests, program: str) -> float | None:
    """The score of a program for the task of the forgeries."""
    row = {"tests": [{"call": [7], "returns": SECRET}], "function": "secret"}
    return reward([f"```python\n{program.strip()}\n```"], [row])[0]


def escaped(name: str, folder: Path) -> str:
    """Let an escape run: "" when it has tried, got nothing, ended as it must, and left nothing on the host."""
    attack = ESCAPES[name]
    canary = folder / "canary"
    canary.write_text("of the host")
    sandbox = Sandbox(LIMITS)
    with socket.create_server(("127.0.0.1", 0)) as server, mock.patch.dict(os.environ, {MARK: "secret"}):
        program = attack.program.replace("CANARY", str(canary)).replace("PORT", str(server.getsockname()[1]))
        program = program.replace("LIBRARY", sysconfig.get_path("stdlib"))
        for _ in range(attack.runs):
            began = time.monotonic()
            seen = sandbox.run(program)
            took = time.monotonic() - began
            output = seen.output or ""
            if "ESCAPED" in output or attack.proof not in output or seen.ending != attack.ending:
                return f"{name}: {seen.ending}, {output[-200:]!r} {seen.message[-200:]}"
            if took > LIMITS.timeout_s + SLACK_S:
                return f"{name}: over after {took:.1f} s"
    if canary.read_text() != "of the host" or sorted(path.name for path in folder.iterdir()) != ["canary"]:
        return f"{name}: something was written outside"
    return ""


def benign(name: str, folder: Path | None = None) -> str:
    """Run a benign program: "" when it prints what it should."""
    program = BENIGN[name]
    seen = Sandbox(Limits(timeout_s=20)).run(program.program, program.stdin)
    if seen.ending == "finished" and seen.output == program.stdout:
        return ""
    return f"{name}: {seen.ending}, {(seen.output or '')[-200:]!r} {seen.message[-200:]}"


def attacks() -> Iterator[Try]:
    """R10."""
    yield from (partial(forged, name) for name in FORGERIES)
    yield from (partial(escaped, name) for name in ESCAPES)


def programs() -> Iterator[Try]:
    """R10."""
    yield from (partial(benign, name) for name in BENIGN)


def layers() -> Iterator[Try]:
    """R11. Each changes the environment of this process: one at a time."""
    yield from (partial(_refused, name) for name in MISSING)


def _refused(name: str, folder: Path) -> str:
    complaint = refusal(name, folder)
    return f"{name}: {complaint}" if complaint else ""
