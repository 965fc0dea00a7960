"""Running programs that a model wrote: each alone, in a sandbox of bubblewrap, seen from outside only by its output.

    sandbox = Sandbox(Limits(timeout_s=2))
    sandbox.check()                                        # UserError with what is missing and what to do
    sandbox.run("print(int(input()) + 1)", "4\\n").output   # "5\\n"
    sandbox.call("def f(x): return x + 1", "f", [4]).output # "5", the JSON of what it returned

Layers: user, pid, mount, network, IPC and UTS namespaces with a user of no rights; a root of its own, read-only, with
nothing but the interpreter, its library and the C library; one writable folder, /tmp, with a quota; no /proc, no
network; a list of allowed system calls (`alignment.seccomp`); limits on address space, CPU time, threads, files and
their size; a wall clock that kills everything; output read up to a limit. Each run looks for those that can be seen
from inside before the program starts, the check for the others; where one is missing nothing runs.

What a program is judged by is compared outside: the expected values are never inside. The exit code is not looked at.
A failure of the sandbox raises `SandboxFailed` and says nothing about the program.

It is not a virtual machine: the kernel is the host's (docs/sandbox.md).
"""

from __future__ import annotations

import contextlib
import json
import marshal
import math
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment import seccomp
from alignment.errors import UserError
from alignment.sandbox_command import ENVIRONMENT, command

Ending = Literal["finished", "timeout", "output"]
"""How a program came to its end: by itself, however; killed by the clock; killed for too much output."""

READY = b"ready\n"
REFUSED = b"refused: "
START_S = 20.0
"""Seconds a sandbox may take to stand; a machine under load needs longer than the 20 ms it takes otherwise."""
DIAGNOSIS = 2000  # bytes kept of what a program writes to stderr
CHUNK = 1 << 16
NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")
_USERNS = (
    "this kernel or container refuses user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0, in a container --security-opt seccomp=unconfined (and as root "
    "--cap-add SYS_ADMIN); or train on a machine that allows them"
)
ADVICE = {
    "Unknown option": "install bubblewrap 0.8 or newer",
    "ew namespace": _USERNS,
    "uid map": _USERNS,
    "setresuid": "user 65534 does not exist in this container; map it, or train as a user other than root",
    "RTM_NEWADDR": _USERNS,  # what AppArmor's restriction looks like
}
"""Part of what bubblewrap says -> what to do."""


class SandboxFailed(RuntimeError):
    """The sandbox did not do its work. Nothing is known of the program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Args:
        timeout_s: seconds by the wall clock from the start of the program; also of CPU time, and one more.
        memory_mb: MiB of address space.
        disk_mb: MiB in /tmp, the only place that can be written to; also the largest file.
        output_kb: KiB of standard output, and of a returned value; with more the program is killed.
        threads: threads at a time. Processes of its own a program cannot have.
        open_files: descriptors at a time.
    """

    timeout_s: float = 5.0
    memory_mb: int = 512
    disk_mb: int = 16
    output_kb: int = 256
    threads: int = 32
    open_files: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise UserError(f"limits.timeout_s is {self.timeout_s}; it must be positive")
        for name, least in (("memory_mb", 64), ("disk_mb", 1), ("output_kb", 1), ("threads", 1), ("open_files", 8)):
            if getattr(self, name) < least:
                raise UserError(f"limits.{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def quota(self) -> int:
        """Bytes in /tmp."""
        return self.disk_mb << 20

    @property
    def resources(self) -> dict[str, int]:
        """The limits of processes, by the names of `alignment.sandbox_inside.HELD`. Besides its threads the pid
        namespace holds the reaper and the program's first thread."""
        return {
            "AS": self.memory_mb << 20,
            "CORE": 0,
            "CPU": math.ceil(self.timeout_s) + 1,
            "FSIZE": self.quota,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "NOFILE": self.open_files,
            "NPROC": self.threads + 2,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What was seen of a program.

    Args:
        ending: how it ended.
        output: what it wrote to standard output; of a call the JSON of the returned value, None when there is none.
        seconds: wall time from its start to its end.
        message: the last of what it wrote to standard error.
    """

    ending: Ending
    output: str | None
    seconds: float
    message: str


@dataclass(slots=True)
class _Streams:
    """What has come from inside so far."""

    status: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    errors_seen: int = 0
    began: float | None = None
    ended: float = 0.0

    def add(self, name: str, data: bytes) -> None:
        if name == "errors":
            self.errors_seen += len(data)
            self.errors = (self.errors + data)[-DIAGNOSIS:]
            return
        stream: bytearray = getattr(self, name)
        stream += data
        if name == "status" and self.began is None and stream.startswith(READY):
            self.began = time.monotonic()
            del stream[: len(READY)]

    def over(self, most: int) -> bool:
        return max(len(self.status), len(self.output), self.errors_seen) > most

    @property
    def message(self) -> str:
        return " ".join(self.errors.decode(errors="replace").split()[-60:])


class Sandbox:
    """Runs programs; from several threads at a time if need be.

    Args:
        limits: what a program may use.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    # ------------------------------------------------------------------ what it does

    def check(self) -> None:
        """Start a sandbox without a program. Raises UserError when it cannot be built or a layer is missing."""
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            raise UserError(
                "programs that a model wrote run only in a sandbox of Linux (x86_64, aarch64), and this is "
                f"{platform.system()} on {platform.machine()}; leave the code rewards out"
            )
        read, write = os.pipe()
        with open(read, "rb") as told:
            try:
                with open(write, "wb") as info:
                    self._execute({"task": "check"}, b"", START_S, ("--info-fd", str(info.fileno())), info.fileno())
            except SandboxFailed as failed:
                raise UserError(f"the sandbox for programs that a model wrote does not stand: {failed}") from failed
            _check_namespaces(told.read())

    def run(self, program: str, stdin: str = "", *, timeout_s: float | None = None) -> Ran:
        """Run a program with this text as standard input.

        Args:
            timeout_s: a shorter time than that of the limits, for this run.

        Raises SandboxFailed.
        """
        streams, ending, seconds = self._execute(
            {"task": "run", "program": program}, stdin.encode(errors="surrogatepass"), timeout_s
        )
        output = streams.output.decode(errors="replace")
        return Ran(ending=ending, output=output, seconds=seconds, message=streams.message)

    def call(self, program: str, function: str, arguments: Sequence[Any], *, timeout_s: float | None = None) -> Ran:
        """Call a function that a program defines with arguments that JSON can hold. Raises SandboxFailed."""
        request = {"task": "call", "program": program, "function": function, "arguments": json.dumps(list(arguments))}
        streams, ending, seconds = self._execute(request, b"", timeout_s)
        value = streams.status.decode(errors="replace") if streams.status else None
        return Ran(ending=ending, output=value, seconds=seconds, message=streams.message)

    def compiles(self, program: str, *, timeout_s: float | None = None) -> bool:
        """Whether Python can compile a program; nothing of it is run. Raises SandboxFailed."""
        streams, _, _ = self._execute({"task": "compile", "program": program}, b"", timeout_s)
        return bytes(streams.status) == b"compiled"

    # ------------------------------------------------------------------ one run

    def _execute(
        self, request: dict[str, Any], stdin: bytes, timeout_s: float | None, options: Sequence[str] = (), *pass_on: int
    ) -> tuple[_Streams, Ending, float]:
        """(what came, how it ended, seconds of the program)."""
        request |= {"quota": self.limits.quota, "limits": self.limits.resources}
        timeout_s = min(timeout_s or self.limits.timeout_s, self.limits.timeout_s)
        streams = _Streams()
        try:
            with ExitStack() as stack:
                asked = stack.enter_context(_memory(marshal.dumps(request)))
                rules = stack.enter_context(_memory(seccomp.compiled()))
                read, write = os.pipe()
                status = stack.enter_context(open(read, "rb", buffering=0))
                with open(write, "wb") as inner:
                    line = command(self.limits.quota, rules, options, (asked, inner.fileno()))
                    process = _started(line, (asked, rules, inner.fileno(), *pass_on))
                stack.callback(_end, process)
                ending = self._follow(process, status, stdin, timeout_s, streams)
        except OSError as error:  # no process, no descriptor, no memory left
            raise SandboxFailed(f"the sandbox cannot be started: {error}") from error
        if streams.began is None:
            raise SandboxFailed(_reason(streams, ending))
        return streams, ending, streams.ended - streams.began

    def _follow(
        self, process: subprocess.Popen[bytes], status: Any, stdin: bytes, timeout_s: float, streams: _Streams
    ) -> Ending:
        """Feed and read until the program has ended, its time is up, or it has said too much."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        created, left = time.monotonic(), memoryview(stdin)

        def remaining() -> float:
            end = created + START_S if streams.began is None else streams.began + timeout_s
            return end - time.monotonic()

        with selectors.DefaultSelector() as selector:
            for file, name in ((status, "status"), (process.stdout, "output"), (process.stderr, "errors")):
                os.set_blocking(file.fileno(), False)
                selector.register(file, selectors.EVENT_READ, name)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE, "input")
            while any(key.data != "input" for key in selector.get_map().values()):
                if (seconds := remaining()) <= 0:
                    return "timeout"
                for key, _ in selector.select(seconds):
                    if key.data == "input":
                        left = _feed(key.fileobj, left, selector)
                    elif data := os.read(key.fd, CHUNK):
                        streams.add(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
                streams.ended = time.monotonic()
                if streams.over(self.limits.output_kb << 10):
                    return "output"
        try:
            process.wait(timeout=max(remaining(), 0.001))
        except subprocess.TimeoutExpired:  # it has closed its streams and goes on
            return "timeout"
        return "finished"


@contextmanager
def _memory(content: bytes) -> Iterator[int]:
    """A descriptor from which `content` can be read."""
    descriptor = os.memfd_create("request")
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _started(line: list[str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=pass_fds,
        env=ENVIRONMENT,
        cwd="/",
        start_new_session=True,  # one group, to be killed as one
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left. With the first process of its pid namespace every process of a program dies."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            file.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # only one inside an uninterruptible call survives
        process.wait(timeout=5)


def _feed(file: Any, left: memoryview, selector: selectors.BaseSelector) -> memoryview:
    """Write what the pipe takes; close it when all is written or nobody reads."""
    try:
        left = left[os.write(file.fileno(), left[:CHUNK]) :] if left else left
    except BlockingIOError:
        return left
    except BrokenPipeError:
        left = left[:0]
    if not left:
        selector.unregister(file)
        file.close()
    return left


def _reason(streams: _Streams, ending: Ending) -> str:
    """Why the program was not started, in one line with what to do."""
    if streams.status.startswith(REFUSED):
        return streams.status[len(REFUSED) :].decode(errors="replace")
    if ending == "timeout":
        return f"nothing came of it within {START_S:g} s"
    said = streams.message or "it ended without a word"
    advice = next((advice for part, advice in ADVICE.items() if part in said), None)
    return said if advice is None else f"{said}; {advice}"


def _check_namespaces(told: bytes) -> None:
    """Compare the namespaces bubblewrap reports with those of this process. Raises UserError when one is shared."""
    try:
        inside = json.loads(told)
    except ValueError:
        inside = {}
    for name in NAMESPACES:
        if inside.get(f"{name}-namespace") in (None, os.stat(f"/proc/self/ns/{name}").st_ino):
            raise UserError(
                f"the sandbox for programs that a model wrote does not stand: its {name} namespace is missing"
            )
