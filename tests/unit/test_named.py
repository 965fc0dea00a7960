"""Functions by name, by import path, with settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.named import Registry


def limited(x: float, *, limit: float | None = 1.0) -> float:
    return x if limit is None else min(x, limit)


def softened(x: float, *, eps: float = 1e-4, batch_eps: float | None = None) -> float:
    return x + eps + (batch_eps or 0.0)


@pytest.fixture
def shapes() -> Registry[Callable[..., float]]:
    registry: Registry[Callable[..., float]] = Registry("shape")

    @registry.register("square")
    def square(x: float, *, factor: float = 1.0) -> float:
        return factor * x * x

    @registry.register("line")
    def line(x: float) -> float:
        return x

    return registry


def test_by_name_with_and_without_settings(shapes: Registry[Callable[..., float]]) -> None:
    assert list(shapes) == ["line", "square"]
    assert "square" in shapes
    assert shapes.get("square")(3.0) == 9.0
    assert shapes.get("square", {"factor": 2.0})(3.0) == 18.0


def test_a_users_file_is_found_by_import_path(
    shapes: Registry[Callable[..., float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_shapes.py").write_text("def cube(x, *, factor=1.0):\n    return factor * x**3\nsize = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shapes.get("my_shapes.cube", {"factor": 0.5})(2.0) == 4.0
    with pytest.raises(UserError, match=r"shape 'my_shapes\.size' is int, not a function"):
        shapes.get("my_shapes.size")
    with pytest.raises(UserError, match=r"shape 'my_shapes\.cone' cannot be imported"):
        shapes.get("my_shapes.cone")


def test_mistakes_are_answered_with_what_exists(shapes: Registry[Callable[..., float]]) -> None:
    with pytest.raises(UserError, match=r"'squar' is not known, did you mean 'square'.*available: line, square"):
        shapes.get("squar")
    with pytest.raises(UserError, match=r"'no_such_file\.f' cannot be imported"):
        shapes.get("no_such_file.f")
    with pytest.raises(UserError, match="'square' has no setting facto; it has factor"):
        shapes.get("square", {"facto": 2})
    with pytest.raises(UserError, match="'line' has no setting factor; it has none"):
        shapes.get("line", {"factor": 2})
    for wrong in ("1e-6", float("nan"), True, None):
        with pytest.raises(UserError, match=rf"shape 'square' has factor {wrong!r}; it is a number"):
            shapes.get("square", {"factor": wrong})
    shapes.register("limited")(limited)
    assert shapes.get("limited", {"limit": None})(3.0) == 3.0
    with pytest.raises(UserError, match="shape 'limited' has limit 'no'; it is a number"):
        shapes.get("limited", {"limit": "no"})
    shapes.register("softened")(softened)
    assert shapes.get("softened", {"eps": 0, "batch_eps": None})(3.0) == 3.0
    for setting in ("eps", "batch_eps"):
        for value in (-1e-8, float("inf"), "1e-8"):
            with pytest.raises(UserError, match=f"'softened' has {setting} {value!r}; it is a number"):
                shapes.get("softened", {setting: value})
    with pytest.raises(ValueError, match="a shape called 'line' exists already"):
        shapes.register("line")(lambda x: x)
