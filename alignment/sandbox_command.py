"""The command that builds the sandbox: what bubblewrap is told, as a plain user and as root."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from alignment.errors import UserError
from alignment.sandbox_inside import UID

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same program gives the same output
    "MALLOC_ARENA_MAX": "1",  # an arena for each thread would use up the address space
}
"""All that a program finds in its environment, but for PWD."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def command(quota: int, rules: int, options: Sequence[str], descriptors: Sequence[int]) -> list[str]:
    """What starts the interpreter inside.

    Args:
        quota: bytes in /tmp.
        rules: descriptor of the system-call filter.
        options: more for bubblewrap.
        descriptors: of the request and of the status; see `alignment.sandbox_inside`.

    Raises UserError naming the package of a program that is missing.
    """
    bwrap = found("bwrap", "bubblewrap", " (Fedora: dnf install bubblewrap)")
    places = _places()
    start = [bwrap]
    if os.geteuid() == 0:
        start, places = _as_nobody(bwrap, places)
    inner = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    inner += ["--unshare-cgroup-try", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
    inner += ["--die-with-parent", "--cap-drop", "ALL"]
    for place, at in places.items():
        inner += ["--ro-bind", place, at]
    inner += _merged("/lib", "/lib64")
    for folder in _covered():
        inner += ["--perms", "0555", "--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    for device in _DEVICES:
        inner += ["--dev-bind", device, device]
    inner += ["--perms", "0700", "--size", str(quota), "--tmpfs", "/tmp", "--remount-ro", "/"]
    inner += ["--chdir", "/tmp", "--seccomp", str(rules), *options, "--"]
    # Neither users' nor site's packages, no byte code written, no current folder on the path.
    python = [_interpreter(), "-s", "-S", "-B", "-P", "-c", _inside(), *map(str, descriptors)]
    return [*start, *inner, *python]


def found(program: str, package: str, besides: str = "") -> str:
    """The path of an installed program. Raises UserError that says how to install it."""
    path = shutil.which(program)
    if path is None:
        raise UserError(
            f"{program} is missing, and programs that a model wrote run only in the sandbox it makes: "
            f"apt-get install {package}{besides}"
        )
    return os.path.realpath(path)


def _as_nobody(bwrap: str, places: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """(how root starts the sandbox, the places as they are seen from there).

    Root outside would be root to the kernel inside as well: the number of its threads has no limit, and files of /proc
    and /sys take it for their owner. So a user of no rights starts the sandbox. A first bubblewrap
    shows that user the interpreter, which may lie in /root; it has a pid namespace too, whose end ends the second: a
    signal to follow a parent into death would not reach another user.
    """
    seen = {place: f"/tmp/{i}" for i, place in enumerate([*places, bwrap])}
    start = [bwrap, "--die-with-parent", "--unshare-pid"]
    start += ["--ro-bind", "/usr", "/usr", *_merged("/bin", "/sbin", "/lib", "/lib64")]
    start += ["--dev-bind", "/dev", "/dev", "--proc", "/proc", "--perms", "0755", "--tmpfs", "/tmp"]
    for place, at in seen.items():
        start += ["--ro-bind", place, at]
    start += ["--", found("setpriv", "util-linux"), f"--reuid={UID}", f"--regid={UID}", "--clear-groups", seen[bwrap]]
    return start, {seen[place]: at for place, at in places.items()}


def _places() -> dict[str, str]:
    """What is shown read-only: place outside -> place inside."""
    base = Path(sys.base_prefix)
    libraries = [base / "lib", base / "lib64", Path("/usr/lib"), Path("/usr/lib64")]
    files = [Path(_interpreter()), Path("/etc/ld.so.cache"), Path("/usr/share/zoneinfo")]
    shown = [str(place) for place in (*libraries, *files) if place.exists() and not place.is_symlink()]
    return dict(zip(shown, shown, strict=True))


def _merged(*folders: str) -> list[str]:
    """These folders of the system: as the links that they are where / and /usr are merged, else themselves."""
    options: list[str] = []
    for folder in folders:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    return options


def _covered() -> Iterator[str]:
    """Folders of installed packages, which are no program's business."""
    library = sysconfig.get_path("stdlib")
    for folder in (f"{library}/site-packages", f"{library}/dist-packages", "/usr/lib/python3/dist-packages"):
        if os.path.isdir(folder):
            yield folder


@lru_cache(maxsize=1)
def _interpreter() -> str:
    """The interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


@lru_cache(maxsize=1)
def _inside() -> str:
    return Path(__file__).with_name("sandbox_inside.py").read_text(encoding="utf-8")
