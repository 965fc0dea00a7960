"""The sandbox as its callers see it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from alignment import sandbox as sandbox_module
from alignment.errors import UserError
from alignment.sandbox import Limits, Sandbox, SandboxFailed
from tests.sandboxes import need_sandbox

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = Limits(timeout_s=0.5, memory_mb=256, output_kb=4)


@pytest.fixture(autouse=True)
def _sandbox() -> None:
    need_sandbox()


def children(of: int | None = None) -> set[int]:
    return {child.pid for child in psutil.Process(of).children(recursive=True) if alive(child.pid)}


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pids: set[int]) -> bool:
    """Whether these processes end within some seconds."""
    for _ in range(200):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.02)
    return False


def test_a_program_is_run() -> None:
    seen = Sandbox().run("import sys\nprint(input()[::-1])\nprint('told', file=sys.stderr)\nsys.exit(7)", "abc\n")
    assert (seen.ending, seen.output, seen.message) == ("finished", "cba\n", "told")
    assert 0 < seen.seconds < 60


def test_a_function_is_called_in_a_world_of_its_own() -> None:
    """What it prints is not its value; a call knows nothing of the one before; `__main__` is not the program's."""
    box = Sandbox()
    program = "calls = []\nif __name__ == '__main__':\n    raise SystemExit\n"
    program += "def f(x, y):\n    calls.append(x)\n    print(0)\n    return {'sum': x + y, 'calls': (len(calls),)}"
    assert box.call(program, "f", [1, 2]).output == '{"sum": 3, "calls": [1]}'
    assert box.call(program, "f", [1, 2]).output == '{"sum": 3, "calls": [1]}'


@pytest.mark.parametrize(
    "program",
    [
        "def g(x):\n    return x",
        "def f(x):\n    return {x}",
        "def f(x):\n    raise ValueError",
        "def f(x:\n    return x",
        "f = 3",
        "\0",
        "\udcff",
    ],
)
def test_no_value_comes_of_a_program_that_returns_none(program: str) -> None:
    seen = Sandbox().call(program, "f", [1])
    assert (seen.ending, seen.output) == ("finished", None)


def test_nothing_of_a_program_is_run_to_compile_it() -> None:
    box = Sandbox(QUICK)
    assert box.compiles("while True:\n    pass")
    assert not box.compiles("while True\n    pass")
    assert not box.compiles("(" * 5000)
    assert not box.compiles("\0")


def test_what_is_too_late_or_too_much_is_killed() -> None:
    box = Sandbox(QUICK)
    before = children()
    late = box.run("import time\nprint('first', flush=True)\ntime.sleep(3600)")
    assert (late.ending, late.output) == ("timeout", "first\n")
    assert 0.45 <= late.seconds < 5
    assert box.call("def f():\n    return 'x' * 5000", "f", []).ending == "output"
    assert gone(children() - before)


def test_a_shorter_time_than_that_of_the_limits() -> None:
    assert Sandbox().run("while True:\n    pass", timeout_s=0.2).seconds < 4


def test_several_threads_at_a_time() -> None:
    box = Sandbox()
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda n: box.run("print(int(input()) ** 2)", f"{n}\n").output, range(12)))
    assert outputs == [f"{n * n}\n" for n in range(12)]


def test_no_descriptor_and_no_child_is_left() -> None:
    box = Sandbox(QUICK)
    box.run("print(1)")
    descriptors, processes = len(os.listdir("/proc/self/fd")), children()
    for program in ("print(1)", "import os\nos.kill(os.getpid(), 9)", "while True:\n    pass"):
        box.run(program)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert gone(children() - processes)


def test_programs_die_with_the_process_that_started_them() -> None:
    code = "from alignment.sandbox import *; Sandbox(Limits(timeout_s=600)).run('import time; time.sleep(600)')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY) as trainer:
        for _ in range(500):
            if len(children(trainer.pid)) >= 3:  # bubblewrap outside, its first process inside, the interpreter
                break
            time.sleep(0.02)
        time.sleep(0.3)  # until the program itself runs
        inside = children(trainer.pid)
        trainer.send_signal(signal.SIGKILL)
    assert len(inside) >= 3
    assert gone(inside)


def test_a_sandbox_that_does_not_come_up_says_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "START_S", 0.0)
    with pytest.raises(SandboxFailed, match="nothing came of it within 0 s"):
        Sandbox().run("print(1)")
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(SandboxFailed, match=r"cannot be started: .*Too many open files"):
        Sandbox().run("print(1)")


def test_another_system_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="only in a sandbox of Linux"):
        Sandbox().check()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"timeout_s": 0.0}, "limits.timeout_s is 0.0; it must be positive"),
        ({"memory_mb": 8}, "limits.memory_mb is 8; it must be at least 64"),
        ({"threads": 0}, "limits.threads is 0; it must be at least 1"),
    ],
)
def test_limits_that_cannot_work(setting: dict[str, float], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Limits(**setting)  # type: ignore[arg-type]


def test_the_threads_of_a_program_are_its_own() -> None:
    """The caller's thread that started a run may end while another one runs."""
    box, outputs = Sandbox(), []
    thread = threading.Thread(target=lambda: outputs.append(box.run("print(1)").output))
    thread.start()
    other = box.run("import time\ntime.sleep(0.3)\nprint(2)").output
    thread.join()
    assert (outputs, other) == (["1\n"], "2\n")


def test_a_plain_user_has_the_sandbox_too() -> None:
    """Root has it started by a user of no rights; here such a user starts it, with the system's interpreter."""
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("only root can become another user")
    code = "from alignment.sandbox import Sandbox; s = Sandbox(); s.check(); print(s.run('print(input())', 'x').output)"
    line = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B", "-c", code]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    if "Permission denied" in done.stderr or "No module named 'alignment'" in done.stderr:
        pytest.skip("other users cannot read the repository")
    assert (done.stdout, done.stderr) == ("x\n\n", "")
