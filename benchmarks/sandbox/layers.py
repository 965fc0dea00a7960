"""The sandbox with a layer missing, for R11: each must be refused with a line that says which.

Where a layer is an option of bubblewrap, a script of that name stands before it on the path and leaves the option out;
where it is something else, it is taken away as it would be on another machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from alignment import seccomp
from alignment.errors import UserError
from alignment.sandbox import Sandbox, SandboxFailed

_WITHOUT = """#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
    a=$1; shift; n=$((n-1))
    if [ "$a" = "{option}" ]; then
        m={values}
        while [ $m -gt 0 ]; do shift; n=$((n-1)); m=$((m-1)); done
    else
        set -- "$@" "$a"
    fi
done
exec {bwrap} "$@"
"""
"""bubblewrap without one of its options."""
_REFUSING = """#!/bin/sh
[ $(id -u) = 0 ] && exec {bwrap} "$@"
exec {bwrap} --unshare-user --disable-userns --dev-bind / / {bwrap} "$@"
"""
"""bubblewrap inside of a sandbox that allows no further user namespace. (Root only shows the interpreter with it.)"""


def _bwrap() -> str:
    path = shutil.which("bwrap")
    assert path is not None
    return os.path.realpath(path)


@contextmanager
def _on_path(folder: Path, script: str) -> Iterator[None]:
    place = folder / "bwrap"
    place.write_text(script)
    place.chmod(0o755)
    with mock.patch.dict(os.environ, {"PATH": f"{folder}:{os.environ['PATH']}"}):
        yield


@contextmanager
def without_option(folder: Path, option: str, values: int) -> Iterator[None]:
    with _on_path(folder, _WITHOUT.format(option=option, values=values, bwrap=_bwrap())):
        yield


@contextmanager
def without_namespaces(folder: Path) -> Iterator[None]:
    with _on_path(folder, _REFUSING.format(bwrap=_bwrap())):
        yield


@contextmanager
def without_bubblewrap(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"PATH": str(folder)}):
        yield


@contextmanager
def without_libseccomp(folder: Path) -> Iterator[None]:
    seccomp.compiled.cache_clear()
    try:
        with mock.patch.object(ctypes, "CDLL", side_effect=OSError("libseccomp.so.2: cannot open shared object file")):
            yield
    finally:
        seccomp.compiled.cache_clear()


@contextmanager
def without_limits(folder: Path) -> Iterator[None]:
    """Behind a filter that refuses to change limits."""
    rules = seccomp.compiled(frozenset({"prlimit64", "setrlimit"}))
    with mock.patch.object(seccomp, "compiled", return_value=rules):
        yield


MISSING: dict[str, tuple[Callable[[Path], object], str]] = {
    "bubblewrap": (without_bubblewrap, "apt-get install bubblewrap"),
    "libseccomp": (without_libseccomp, "apt-get install libseccomp2"),
    "user namespaces": (without_namespaces, "refuses user namespaces"),
    "network namespace": (lambda folder: without_option(folder, "--unshare-net", 0), "its net namespace is missing"),
    "ipc namespace": (lambda folder: without_option(folder, "--unshare-ipc", 0), "its ipc namespace is missing"),
    "pid namespace": (lambda folder: without_option(folder, "--unshare-pid", 0), "user or pid namespace is missing"),
    "system-call filter": (lambda folder: without_option(folder, "--seccomp", 1), "seccomp filter is missing"),
    "quota": (lambda folder: without_option(folder, "--size", 1), "quota of /tmp is missing"),
    "read-only root": (lambda folder: without_option(folder, "--remount-ro", 1), "/ is not read-only"),
    "limits": (without_limits, "a limit was refused"),
}
"""Layer -> (a context without it, given an empty folder; what the refusal says)."""
INSIDE = ("pid namespace", "system-call filter", "quota", "read-only root", "limits")
"""Layers that every run looks for itself, not only the check at the start."""


def refusal(layer: str, folder: Path) -> str:
    """Take the layer away and try to run something: "" when it was refused as it should be, else what happened."""
    context, words = MISSING[layer]
    with context(folder):  # type: ignore[attr-defined]
        try:
            Sandbox().check()
            return "the check passes"
        except UserError as error:
            said = str(error)
        ran = _ran() if layer in INSIDE else ""
    if words not in said or "\n" in said:
        return f"said: {said}"
    return ran


def _ran() -> str:
    try:
        return f"a program ran: {Sandbox().run('print(1)').output}"
    except SandboxFailed:
        return ""
