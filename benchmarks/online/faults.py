"""A reward that raises on 1 % of its calls and hangs on 0.1 %: the run ends, and its metrics say how often it did.

Whether a call fails is a keyed hash of what it scores. The reward notes each fault in a journal before it commits it,
so what was injected is known from outside the run. A trained policy says the same several times, and the same text
meets the same fault.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from alignment.checkpoint import load_checkpoint_folder
from alignment.training import STATE_KEY
from benchmarks.online.bench import alignment, table
from benchmarks.online.tiny import make_start

JOURNAL = "faults.txt"
BATCH, STEPS = 128, 300
RAISES, HANGS = 0.01, 0.001

REWARDS = f'''\
"""A user's own reward, which sometimes fails."""

import hashlib
import os
import time


def _note(kind):
    # One short write in append mode: it is whole, and it stays when the process is killed.
    descriptor = os.open({JOURNAL!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(descriptor, (kind + "\\n").encode())
    os.close(descriptor)


def flaky(prompt: str, completion: str, answer: str) -> float:
    """1 for the right answer, if all goes well."""
    digest = hashlib.blake2b(f"fault {{prompt}} {{completion}}".encode(), digest_size=8).digest()
    draw = int.from_bytes(digest, "big") / 2**64
    if draw < {RAISES}:
        _note("raise")
        raise RuntimeError("this reward fails now and then")
    if draw < {RAISES + HANGS}:
        _note("timeout")
        time.sleep(3600)
    return float(completion == answer)
'''


def run(data: Path) -> dict[str, Any]:
    """A short run first, so that what every run leaves open is open; then the real one, counted before and after."""
    make_start()
    Path("my_rewards.py").write_text(REWARDS)
    alignment("fit", "faults", "warm-up", "--trainer.max_steps=2")
    Path(JOURNAL).write_text("")
    before = _held()
    fit = alignment("fit", "faults", "faults")
    after = _held()
    injected = Counter(Path(JOURNAL).read_text().split())
    kinds = load_checkpoint_folder(fit.checkpoint)[STATE_KEY]["rewards"]["history"]["kinds"]["flaky"]
    counted = sum(round(share * BATCH) for _, share in fit.curve("rewards/flaky/faults"))
    abstained = sum(round(share * BATCH) for _, share in fit.curve("rewards/flaky/abstained"))
    return {
        "steps": len(fit.curve("loss")),
        "calls": STEPS * BATCH,
        "injected": dict(injected),
        "kinds": kinds,
        "counted": counted,
        "abstained": abstained,
        "logged": _log_lines(),
        "reward": {"first": fit.curve("reward")[0][1], "last": fit.last("reward")},
        "children": {"before": before[0], "after": after[0]},
        "descriptors": {"before": before[1], "after": after[1]},
        "threads": {"before": before[2], "after": after[2]},
        "seconds": fit.seconds,
        "cpu_seconds": fit.cpu_seconds,
    }


def _held() -> tuple[int, int, int]:
    """(child processes, zombies included; open descriptors; threads) of this process."""
    process = psutil.Process(os.getpid())
    return len(process.children(recursive=True)), process.num_fds(), process.num_threads()


def _log_lines() -> int:
    """Lines in the log that tell of a fault."""
    return len(re.findall("reward 'flaky' abstains", Path("output.txt").read_text()))


def block(found: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    injected, kinds = found["injected"], found["kinds"]
    pairs = [(name, found[name]) for name in ("children", "descriptors", "threads")]
    rows = [
        ["optimizer steps done, of those asked for", f"{found['steps']} of {STEPS}"],
        ["calls of the reward", f"{found['calls']:,}"],
        ["calls that raised: injected, counted by the run", f"{injected['raise']}, {kinds['raise']}"],
        ["calls over the time limit: injected, counted", f"{injected['timeout']}, {kinds['timeout']}"],
        ["faults and abstentions in the metrics", f"{found['counted']}, {found['abstained']}"],
        [
            "mean reward of the first and the last batch",
            f"{found['reward']['first']:.2f}, {found['reward']['last']:.2f}",
        ],
        *([f"{name} of the process, before and after", f"{n['before']}, {n['after']}"] for name, n in pairs),
        ["seconds", f"{found['seconds']:.0f}"],
    ]
    exact = injected == kinds and sum(kinds.values()) == found["counted"] == found["abstained"]
    return [*table(["", ""], rows), "", f"Faults injected and faults counted {'agree' if exact else 'DO NOT AGREE'}."]


def picture(found: dict[str, Any], path: Path) -> None:
    """Nothing to draw."""
