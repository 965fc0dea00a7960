"""Worker processes that make the calls of rewards, each watched by a thread of its own that kills and restarts it.

A worker is started with exec, never forked, so threads and GPU state of the trainer do not matter; it leads its own
process group, which is killed as one. A call that raises leaves its worker alone; one that hangs or takes its process
down costs the completion it was scoring, and the rest of its share is scored by the next process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from alignment.errors import UserError
from alignment.rewards.calls import Source, Wanted
from alignment.rewards.child import LENGTH
from alignment.rewards.protocol import FaultKind, Outcome, SuiteConfig

GLANCE = 0.1
"""Seconds between two looks at whether a silent worker is alive and still wanted."""
STRIKES = 3
"""Time-outs in a row after which the rest of a worker's share abstains untried: a reward that hangs on everything costs
three deadlines, not one for each completion."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from alignment.rewards.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


class Lost(Exception):
    """A worker that cannot go on, and why."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind
        self.message = message


class Dropped(Exception):
    """The call was cancelled, or the workers were closed, before it was finished."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A worker's share of one reward's completions. `body` is empty when only the parameters are asked for.

    Args:
        body: pickled (arguments, keys), `size` of each.
        result: a list of outcomes, or `Wanted` for an empty body.
    """

    name: str
    body: bytes
    size: int
    per_sample: bool
    timeout_s: float
    seconds: float = 0.0
    result: Future[Any] = field(default_factory=Future)


class Process:
    """One worker process and the socket to it. `unwanted` is asked now and then whether to give up waiting."""

    def __init__(self, setup: bytes, unwanted: Callable[[], bool]) -> None:
        self._setup, self._unwanted = setup, unwanted
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = bytearray()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self, timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        self._socket, self._buffer = ours, bytearray()
        with theirs:
            command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what rewards print is no output of the run
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, **_ENVIRONMENT},
                )
            except OSError as error:
                self.kill()
                raise Lost("load", f"no worker can be started: {error}") from error
        self.send(self._setup, timeout_s)

    def send(self, body: bytes, timeout_s: float) -> None:
        """Hand over a frame. Raises Lost after `timeout_s`, or when the process is gone."""
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        left = memoryview(LENGTH.pack(len(body)) + body)
        while left:
            self._socket.settimeout(GLANCE)
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                self._check(deadline, f"its worker took no data for {timeout_s:g} s")
            except OSError as error:
                raise Lost("crash", self._epitaph()) from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises Lost after `timeout_s`, or when the process is gone."""
        deadline = time.monotonic() + timeout_s
        while (frame := self._frame()) is None:
            self._read(deadline, f"no value within {timeout_s:g} s")
        if self._unwanted():
            raise Dropped
        try:
            answer: dict[str, Any] = json.loads(frame)
        except ValueError as error:
            raise Lost("crash", "its worker's answer is garbled") from error
        return answer

    def _frame(self) -> bytes | None:
        if len(self._buffer) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return frame

    def _read(self, deadline: float, complaint: str) -> None:
        """Wait for bytes for a moment. What has come is taken even after the deadline: then the trainer was late."""
        assert self._socket is not None
        self._socket.settimeout(min(max(deadline - time.monotonic(), 0.001), GLANCE))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            self._check(deadline, complaint)
            return
        except OSError:
            data = b""
        if not data:
            raise Lost("crash", self._epitaph())
        self._buffer += data

    def _check(self, deadline: float, complaint: str) -> None:
        """Whether to wait on for a silent process; raises Lost or Dropped if not."""
        assert self._process is not None
        if self._unwanted():
            raise Dropped
        if self._process.poll() is not None:  # what it started may still hold the other end of the socket
            raise Lost("crash", self._epitaph())
        if time.monotonic() >= deadline:
            raise Lost("timeout", complaint)

    def _epitaph(self) -> str:
        """What became of a process that no longer answers."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "its worker has closed its connection"
        if status == -signal.SIGKILL:
            return "its worker was killed (SIGKILL; was memory short?)"
        return f"its worker died of: {signal.strsignal(-status)}" if status < 0 else f"its worker exited ({status})"

    def kill(self) -> None:
        """End the process with all it has started, and collect it. Does nothing when there is none."""
        if self._process is not None:
            # Nothing is left of the group, or, on macOS, only zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # Only a process inside an uninterruptible system call survives; subprocess collects it later.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None


class Watcher(threading.Thread):
    """Takes jobs from the queue and has one process do them. The thread must live as long as its process, which the
    kernel kills when the thread that started it ends."""

    def __init__(
        self, jobs: queue.SimpleQueue[Job | None], setup: bytes, closing: threading.Event, load_s: float
    ) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self._jobs, self._closing, self._load_s = jobs, closing, load_s
        self._job: Job | None = None
        self._process = Process(setup, self._unwanted)

    def _unwanted(self) -> bool:
        return self._closing.is_set() or (self._job is not None and self._job.result.cancelled())

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._job = job
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile: nobody waits
                self._do(job)
            self._job = None
        self._process.kill()

    def _do(self, job: Job) -> None:
        if self._unwanted():
            job.result.set_exception(Dropped("the rewards were closed while they were being computed"))
            return
        started = time.monotonic()
        try:
            result = self._outcomes(job) if job.body else self._begin(job, 0)
        except BaseException as error:  # a thread's error reaches nobody; here it reaches the one who waits
            self._process.kill()
            job.result.set_exception(error)
        else:
            job.seconds = time.monotonic() - started
            job.result.set_result(result)

    def _begin(self, job: Job, start: int) -> Wanted:
        """Hand the job to the process, starting one if there is none. Raises Lost when the reward cannot be loaded."""
        while True:
            used = self._process.running
            try:
                if not used:
                    self._process.start(self._load_s)
                self._process.send(json.dumps({"name": job.name, "start": start}).encode(), self._load_s)
                self._process.send(job.body, self._load_s)
                answer = self._process.receive(self._load_s)
                break
            except Lost as lost:
                self._process.kill()
                if not used:
                    raise Lost("load", lost.message) from lost
                # It died of something it did earlier, such as a thread a reward had left behind: a fresh one then.
        if "failed" in answer:
            raise Lost("load", answer["failed"])
        per_sample, *names = answer["wanted"]
        return Wanted(per_sample, *map(tuple, names))

    def _outcomes(self, job: Job) -> list[Outcome]:
        done: list[Outcome] = []
        strikes = 0
        while len(done) < job.size:
            before = len(done)
            try:
                self._call(job, done)
            except Lost as lost:
                self._process.kill()
                strikes = (strikes if len(done) == before else 0) + 1 if lost.kind == "timeout" else 0
                left = job.size - len(done)
                alone = job.per_sample and lost.kind != "load" and strikes < STRIKES
                done += [Outcome(None, lost.kind, lost.message)] * (1 if alone else left)
        return done

    def _call(self, job: Job, done: list[Outcome]) -> None:
        """Add outcomes to `done` until the job is complete, or a call ran out of memory."""
        self._begin(job, len(done))
        while len(done) < job.size:
            answer = self._process.receive(job.timeout_s)
            outcomes = [Outcome(*outcome) for outcome in answer["outcomes"]]
            done += outcomes
            if any(outcome.kind == "memory" for outcome in outcomes):
                self._process.kill()  # what it holds is unknown; the next one starts clean
                return


class WorkerPool:
    """Workers that share one queue.

    Args:
        sources: what each reward's name stands for.
        config: number and limits of the workers.
        seed: base of the rewards' own random numbers.
    """

    def __init__(self, sources: Mapping[str, Source], config: SuiteConfig, seed: int) -> None:
        self.owner = os.getpid()
        try:
            setup = pickle.dumps({"sources": dict(sources), "memory_mb": config.memory_mb, "seed": seed})
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UserError(f"the args of a reward cannot be sent to a worker: {error}") from error
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._load_s = config.load_timeout_s
        self._watchers = [
            Watcher(self._jobs, setup, self._closing, config.load_timeout_s) for _ in range(config.workers)
        ]
        for watcher in self._watchers:
            watcher.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def parameters(self, names: list[str]) -> dict[str, Wanted]:
        """What each reward wants. Loads them; raises UserError naming the first that cannot be loaded."""
        jobs = [Job(name=n, body=b"", size=0, per_sample=False, timeout_s=self._load_s) for n in names]
        for job in jobs:
            self.submit(job)
        found: dict[str, Wanted] = {}
        for job in jobs:
            try:
                found[job.name] = job.result.result()
            except Lost as lost:
                raise UserError(f"reward '{job.name}' cannot be loaded: {lost.message}") from lost
        return found

    def close(self) -> None:
        """Kill the workers and what they run. Does nothing in a process forked from the one that started them."""
        if os.getpid() != self.owner or self._closing.is_set():
            return
        self._closing.set()
        for _ in self._watchers:
            self._jobs.put(None)
        for watcher in self._watchers:
            watcher.join(timeout=2.0)
