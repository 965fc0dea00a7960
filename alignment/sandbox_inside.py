"""What runs first inside the sandbox: it lowers the limits, looks whether every layer is there, and starts the program.

Its text is handed to the interpreter inside; it needs nothing but the standard library. It is started as

    python -c TEXT REQUEST STATUS

with the numbers of two descriptors. REQUEST holds the marshalled request and is closed before the program is compiled.
On STATUS it says `ready`, a line that no program can write, for none runs yet; or `refused: REASON`. After `ready` what
comes there is the program's word: for a call the JSON of what it returned. There is nothing here to be forged: what is
expected is known outside only.
"""

from __future__ import annotations

import builtins
import marshal
import os
import resource
import sys
from types import CodeType, ModuleType
from typing import Any

UID = 65534
HELD = ("AS", "CORE", "CPU", "FSIZE", "MEMLOCK", "MSGQUEUE", "NOFILE", "NPROC")
"""Limits that are set, by the names of the resource module without RLIMIT_."""


def limit(wanted: dict[str, int]) -> None:
    """Lower soft and hard limits. Raises OSError or ValueError when the kernel refuses."""
    for name in HELD:
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        most = wanted[name] if hard == resource.RLIM_INFINITY else min(wanted[name], hard)
        resource.setrlimit(number, (most, most))
        if resource.getrlimit(number) != (most, most):
            raise OSError(f"RLIMIT_{name} stays at {resource.getrlimit(number)}")


def missing(quota: int) -> str:
    """The first layer that is not as it should be; "" when all are there."""
    if os.getuid() != UID or os.getppid() != 1:
        return "the user or pid namespace is missing"
    try:
        os.close(os.memfd_create("probe"))
        return "the seccomp filter is missing"
    except OSError:
        pass
    for folder in ("/", sys.base_prefix, os.path.dirname(os.__file__)):
        if not os.statvfs(folder).f_flag & os.ST_RDONLY:
            return f"{folder} is not read-only"
    space = os.statvfs("/tmp")
    if space.f_blocks * space.f_frsize > quota:
        return "the quota of /tmp is missing"
    return ""


def start(request: dict[str, Any], status: int) -> None:
    """Do what is asked: `check` nothing, `compile`, `run` as a program, or `call` a function of it."""
    task = request["task"]
    if task == "run":
        os.close(status)
    if task == "check":
        return
    code = compile(request["program"], "program.py", "exec", dont_inherit=True)
    if task == "compile":
        os.write(status, b"compiled")
        return
    # A module of its own: the program's classes can be pickled, and `if __name__ == "__main__"` holds where it is run.
    module = ModuleType("__main__" if task == "run" else "program")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    if task == "call":
        call(code, module, request, status)
    else:
        exec(code, module.__dict__)


def call(code: CodeType, module: ModuleType, request: dict[str, Any], status: int) -> None:
    import json  # only here: it costs a fifth of the start

    arguments = json.loads(request["arguments"])
    exec(code, module.__dict__)
    text = json.dumps(getattr(module, request["function"])(*arguments)).encode()
    while text:
        text = text[os.write(status, text) :]


def main() -> None:
    asked, status = int(sys.argv[1]), int(sys.argv[2])
    with open(asked, "rb") as file:
        request = marshal.loads(file.read())
    os.closerange(3, status)  # whatever else has come in
    os.closerange(status + 1, 1 << 16)
    try:
        complaint = missing(request["quota"])
        limit(request["limits"])
    except (OSError, ValueError) as error:
        complaint = f"a limit was refused ({error})"
    if complaint:
        os.write(status, f"refused: {complaint}".encode())
        return
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # site would add them; it is not imported
    os.write(status, b"ready\n")
    start(request, status)


if __name__ == "__main__":
    main()
