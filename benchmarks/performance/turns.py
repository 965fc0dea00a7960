"""Workers that take turns, one training step at a time; nothing but the standard library.

The parent starts each worker with two inherited pipes, whose numbers are in the environment variables TURN_READ and
TURN_WRITE. Lines of JSON go both ways: the worker says `ready` before its first step and `done` after every step, and
goes on when it reads `go`. Everything it does between being let go and `done` counts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

READ, WRITE = "TURN_READ", "TURN_WRITE"
PATIENCE = 3600.0
"""Seconds without an answer after which a worker counts as hung."""
TAIL = 4000
"""Characters of a dead worker's log that are shown."""


# ---------------------------------------------------------------------------------------------- in the worker


class Turn:
    """A worker's end of the pipes."""

    def __init__(self) -> None:
        read, write = int(os.environ[READ]), int(os.environ[WRITE])
        for descriptor in (read, write):
            os.set_inheritable(descriptor, False)  # a surviving child would keep the parent waiting
        self._from, self._to = os.fdopen(read), os.fdopen(write, "w")
        self._step = 0
        self._begun = self._cpu = 0.0

    def ready(self, **info: Any) -> bool:
        """Before the first step: sends `info` and the seconds since the process began; waits. False: end now."""
        return self._say_and_wait({"ready": True, "since_start": since_start(), **memory(), **info})

    def done(self, **result: Any) -> bool:
        """At the end of a step: sends its number from 1, its wall and CPU seconds and `result`; waits. False: end."""
        seconds, cpu = time.perf_counter() - self._begun, cpu_seconds() - self._cpu
        self._step += 1
        return self._say_and_wait({"step": self._step, "seconds": seconds, "cpu": cpu, **memory(), **result})

    def end(self, **info: Any) -> None:
        """The last words, which the parent's `stop` returns."""
        self._say({"end": True, **memory(), **info})

    def _say(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._to.write(json.dumps(message) + "\n")
            self._to.flush()

    def _say_and_wait(self, message: Mapping[str, Any]) -> bool:
        self._say(message)
        goes_on = self._from.readline().strip() == "go"  # "" when the parent is gone
        self._cpu, self._begun = cpu_seconds(), time.perf_counter()
        return goes_on


@functools.cache
def current() -> Turn:
    """This process's end, made when it is first asked for."""
    return Turn()


def since_start() -> float:
    """Seconds since this process began."""
    ticks = int(_stat("self")[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time of this process and of its descendants, dead (if waited for) or alive."""
    times = os.times()
    mine = time.process_time() + times.children_user + times.children_system
    ticks = 0
    for child in descendants():
        with contextlib.suppress(OSError):
            ticks += sum(int(field) for field in _stat(child)[11:15])  # user, system, and those of its own children
    return mine + ticks / os.sysconf("SC_CLK_TCK")


def memory() -> dict[str, int]:
    """`rss_peak`: bytes, the highest of this process plus the highest of every live descendant."""
    return {"rss_peak": sum(map(_peak, [os.getpid(), *descendants()]))}


def descendants() -> list[int]:
    """Ids of the live processes that stem from this one."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parents.setdefault(int(_stat(folder.name)[1]), []).append(int(folder.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _stat(process: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; the second, a name, may hold blanks."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _peak(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0  # it ended meanwhile, or is a zombie


# ---------------------------------------------------------------------------------------------- in the parent


class Worker:
    """A process that takes turns.

    Args:
        command: what to run. env: added to this process's environment. log_path: gets what the worker prints.
        patience: seconds without an answer after which it is ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        log_path: Path | str = "worker.log",
        patience: float = PATIENCE,
    ) -> None:
        self.command, self.env, self.cwd, self.log_path = list(command), dict(env or {}), cwd, Path(log_path)
        self.patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._to: IO[str] | None = None
        self._from = -1
        self._unread = b""

    def start(self) -> dict[str, Any]:
        """Start it and wait until it is ready. Returns what it said then."""
        read, their_write = os.pipe()
        their_read, write = os.pipe()
        env = os.environ | self.env | {READ: str(their_read), WRITE: str(their_write)}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=env,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(their_read, their_write),
                start_new_session=True,  # so that its children end with it
            )
        os.close(their_read)
        os.close(their_write)
        self._from, self._to, self._unread = read, os.fdopen(write, "w"), b""
        return self._expect("ready")

    def step(self) -> dict[str, Any]:
        """Let it go for one step. Returns what it said at the end. Raises RuntimeError when it died or hangs."""
        self._send("go")
        return self._expect("step")

    def stop(self) -> dict[str, Any]:
        """End it. Returns its last words, {} when it had none; a worker that is dead already is only cleared away."""
        if self._process is None:
            return {}
        self._send("stop")
        last: dict[str, Any] = {}
        while (message := self._receive(60.0)) is not None:
            last = message if "end" in message else last
            if last:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._clear()
        return last

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _send(self, word: str) -> None:
        assert self._to is not None, "start() comes first"
        with contextlib.suppress(BrokenPipeError):  # the answer, or its absence, tells
            self._to.write(word + "\n")
            self._to.flush()

    def _expect(self, key: str) -> dict[str, Any]:
        message = self._receive(self.patience)
        if message is not None and key in message:
            return message
        why = "ended before its turn was over" if message is None else f"said {message} instead of '{key}'"
        hung = self._process is not None and self._process.poll() is None and message is None
        if hung:
            why = f"gave no answer within {self.patience:g} s"
        status = self._clear()
        tail = self.log_path.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        raise RuntimeError(
            f"{' '.join(self.command)} {why} (exit status {status}); the end of {self.log_path}:\n{tail}"
        )

    def _receive(self, patience: float) -> dict[str, Any] | None:
        """The next message; None when the worker is dead or the time is up."""
        assert self._process is not None, "start() comes first"
        deadline = time.monotonic() + patience
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._from], [], [], 0.5)
            if readable:
                piece = os.read(self._from, 1 << 16)
                if not piece:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(30)
                    return None
                self._unread += piece
            elif self._process.poll() is not None or time.monotonic() > deadline:
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _clear(self) -> int | None:
        """End what is left of the worker and its children. Returns the exit status."""
        if self._process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        os.close(self._from)
        if self._to is not None:
            with contextlib.suppress(BrokenPipeError):
                self._to.close()
        self._process, self._to = None, None
        return status


def alternate(workers: Sequence[Worker], steps: int) -> list[list[dict[str, Any]]]:
    """One step of each worker, in turn, `steps` times over. Returns the results of each worker."""
    results: list[list[dict[str, Any]]] = [[] for _ in workers]
    for _ in range(steps):
        for worker, found in zip(workers, results, strict=True):
            found.append(worker.step())
    return results
