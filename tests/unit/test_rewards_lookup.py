"""What is told of a reward's import path without running its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.rewards.lookup import look_up

FILE = """
raise RuntimeError("this file must not run")
import os
from math import sqrt as root
if os.name == "posix":
    def inside(completion): ...
try:
    a, (b, c) = object()
except ValueError as error:
    later = lambda completion: 1.0
def fine(completions, **rest): ...
def nothing(prompt): ...
def both(completion, completions): ...
def positional(completion, /): ...
async def slow(completion): ...
@os.wraps
def wrapped(anything): ...
class Empty: ...
class Inherits(Empty): ...
class Good:
    def __call__(self, completion, answer): ...
class Bad:
    def __call__(self, text): ...
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reward_file.py").write_text(FILE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("from os import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAMES = ["inside", "root", "a", "b", "c", "later", "fine", "wrapped", "Inherits", "Good"]


@pytest.mark.parametrize("path", [*(f"reward_file.{name}" for name in NAMES), "package.inner.anything", "math.sqrt"])
def test_what_may_be_a_reward(place: Path, path: str) -> None:
    look_up(path)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("reward_file.fin", "'reward_file' has no 'fin'; did you mean 'fine'"),
        ("reward_file.zzz", "'reward_file' has no 'zzz'; it has inside, fine, nothing, both, positional, slow,"),
        ("reward_fle.fine", "there is no module 'reward_fle'; did you mean 'reward_file.fine'"),
        ("package.outer.x", "there is no module 'package.outer'; your own file lies in"),
        ("reward_file.inner.x", "there is no module 'reward_file.inner'"),
        ("reward_file.nothing", r"it must have a parameter .* and has \(prompt\)"),
        ("reward_file.both", r"it must have a parameter .* and has \(completion, completions\)"),
        ("reward_file.positional", "it has positional-only parameters"),
        ("reward_file.slow", "it is a coroutine function"),
        ("reward_file.Empty", "the class 'Empty' has no __call__"),
        ("reward_file.Bad", r"and has \(text\)"),
    ],
)
def test_what_cannot_be_one(place: Path, path: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        look_up(path)


def test_a_file_that_is_not_python(place: Path) -> None:
    (place / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=r"broken\.py, line 2: invalid syntax"):
        look_up("broken.f")
