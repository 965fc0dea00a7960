"""Functions by name: the built-in ones, and a user's own by import path.

    ADVANTAGES = Registry[Advantage]("advantage")
    @ADVANTAGES.register("group")
    def group(table, *, eps=1e-4): ...

    ADVANTAGES.get("group", {"eps": 1e-6})     a built-in one with another setting
    ADVANTAGES.get("my_file.my_advantage")     any importable function, registered or not

A function's settings are its keyword-only arguments; their defaults are the paper's values.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from alignment.errors import UserError

EPS = ("eps", "batch_eps")
"""Settings that are added to what is divided by."""

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind, by name.

    Args:
        kind: what they are, for error messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator. Raises ValueError when the name is taken."""

        def add(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"a {self.kind} called '{name}' exists already")
            self._functions[name] = function
            return function

        return add

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))

    def find(self, name: str) -> F:
        """The function called `name`, or the one at the import path `name`. Raises UserError when there is none."""
        if name in self._functions:
            return self._functions[name]
        if not isinstance(name, str):
            raise UserError(f"{self.kind} is {name}; available: {', '.join(self)}, or the import path of your own")
        if "." not in name:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            raise UserError(
                f"{self.kind} '{name}' is not known{hint}; available: {', '.join(self)}, or the import path of your own"
            )
        return cast(F, imported(self.kind, name))

    def get(self, name: str, options: Mapping[str, Any] | None = None) -> F:
        """`find`, with some of the function's settings given. Raises UserError for one that it does not have, for one
        without a default that is not given, for one that is no number where its default is, and for an `eps` below
        0."""
        function, given = self.find(name), dict(options or {})
        settings = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        if unknown := sorted(set(given) - {p.name for p in settings}):
            known = ", ".join(p.name for p in settings) or "none"
            raise UserError(f"{self.kind} '{name}' has no setting {', '.join(unknown)}; it has {known}")
        if missing := [p.name for p in settings if p.default is p.empty and p.name not in given]:
            raise UserError(f"{self.kind} '{name}' needs the setting {', '.join(missing)}")
        for p in settings:
            off = given.get(p.name) is None and "None" in str(p.annotation)
            if p.name in given and is_number(p.default) and not (off or is_number(given[p.name])):
                raise UserError(f"{self.kind} '{name}' has {p.name} {given[p.name]!r}; it is a number")
            if p.name in EPS and p.name in given and not off:
                value = given[p.name]
                if not is_number(value) or not 0 <= value < math.inf:
                    raise UserError(f"{self.kind} '{name}' has {p.name} {value!r}; it is a number of at least 0")
        return cast(F, functools.partial(function, **given)) if given else function


def is_number(value: object) -> bool:
    """Whether a setting is one: neither NaN nor text nor a yes or no."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def imported(kind: str, path: str) -> Callable[..., Any]:
    """The function at an import path (`my_file.my_function`). Raises UserError, naming `kind`, when there is none."""
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{kind} '{path}' cannot be imported: {error}") from error
    if not callable(found):
        raise UserError(f"{kind} '{path}' is {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def import_path(function: Callable[..., Any]) -> str | None:
    """The inverse of `imported`: where another process finds a function or class, None where it cannot (a lambda, one
    inside another, an object, or one of the program's own file)."""
    name, module = getattr(function, "__qualname__", "<object>"), getattr(function, "__module__", "__main__")
    return None if module == "__main__" or "<" in name or "." in name else f"{module}.{name}"
