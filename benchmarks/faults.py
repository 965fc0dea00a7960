"""What can happen to a checkpoint on its way to the disk and on it: death at any call, damage, a disk that refuses."""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alignment.checkpoint import point
from alignment.checkpoint_folder import retire, write_checkpoint


def state(step: int) -> dict[str, Any]:
    """A small training state."""
    weight = torch.full((3, 2), float(step))
    return {"global_step": step, "epoch": 0, "state_dict": {"w": weight}, "hyper_parameters": {"beta": 0.1}}


def save(path: Path, step: int) -> Path:
    """Write the state of a step; the path again."""
    write_checkpoint(state(step), path)
    return path


# ---------------------------------------------------------------------- death


class Dead(BaseException):
    """The process is gone: nothing after it runs, and what was not fsynced is damaged."""


class Mortal:
    """Within this context a process counts the calls that touch the disk and dies at one of them (`Dead` is raised by
    that call and every later one, so no clean-up runs either). A file that was not fsynced by then loses its second
    half when the power is cut.

    Args:
        root: the folder whose files are watched.
        die_at: the call to die at, from 1.
    """

    NAMES = ("mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "fsync")

    def __init__(self, root: Path, die_at: int) -> None:
        self.calls, self.die_at, self.root = 0, die_at, root
        self.log: list[str] = []
        self._unsynced: set[int] = set()
        self._real: dict[str, Callable[..., Any]] = {}
        self._open = builtins.open

    def __enter__(self) -> Mortal:
        self._real = {name: getattr(os, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(os, name, self._wrap(name, self._real[name]))
        builtins.open = self._opened  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        builtins.open = self._open

    def _opened(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode or not str(path).startswith(str(self.root)):
            return self._open(path, mode, *args, **kwargs)
        self._tick(f"open {Path(path).name}")
        file = self._open(path, mode, *args, **kwargs)
        self._unsynced.add(os.fstat(file.fileno()).st_ino)
        return file

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._tick(name)
            if name == "fsync":
                # What is on the disk is modelled here: nothing waits for a real one.
                self._unsynced.discard(os.fstat(args[0]).st_ino)
                return None
            return real(*args, **kwargs)

        return call

    def _tick(self, what: str) -> None:
        self.calls += 1
        self.log.append(what)
        if self.calls >= self.die_at:
            raise Dead

    def power_cut(self) -> None:
        for path in self.root.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_ino in self._unsynced:
                os.truncate(path, path.stat().st_size // 2)


def new_name(folder: Path) -> None:
    save(folder / "b.ckpt", 2)
    point(folder / "last.ckpt", folder / "b.ckpt")


def same_name(folder: Path) -> None:
    save(folder / "a.ckpt", 2)


def retiring(folder: Path) -> None:
    for step, name in enumerate("bcd", start=2):
        save(folder / f"{name}.ckpt", step)
        point(folder / "last.ckpt", folder / f"{name}.ckpt")
        retire(folder / f"{chr(ord(name) - 1)}.ckpt")


def last_is_a_folder(folder: Path) -> None:
    save(folder / "last.ckpt", 2)
    save(folder / "b.ckpt", 3)
    point(folder / "last.ckpt", folder / "b.ckpt")


SCENARIOS = (new_name, same_name, retiring, last_is_a_folder)
"""Things a run does in a folder that holds `a.ckpt` and a pointer to it."""


# ---------------------------------------------------------------------- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(position: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(position * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return flip


def missing(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """The same file of another checkpoint, of the same size."""
    shutil.copy(path.parent.parent / "a.ckpt" / path.name, path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "empty": empty,
    "grown": grow,
    "zeroed": zero,
    "missing": missing,
    "swapped": swap,
}
DAMAGE |= {f"bit at {at}": flip(at) for at in (0.0, 0.03, 0.2, 0.5, 0.8, 0.95, 1.0)}
