"""Settings as configuration dataclasses, and as the plain values that checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from alignment.errors import UserError
from alignment.named import import_path

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Dataclasses to mappings, tuples to lists and functions to their import paths, recursively."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if callable(value):
        return import_path(value) or value
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def holds_callable(value: Any) -> bool:
    """Whether `plain` has left a function as it is, somewhere in there."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return callable(value) or any(map(holds_callable, parts))


def as_config(cls: type[T], value: T | Mapping[str, Any] | None) -> T:
    """A config dataclass from itself or from a mapping of its fields, nested dataclasses included. Raises UserError for
    a field that does not exist."""
    if value is None:
        return cls()
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"expected {cls.__name__} or a mapping of its fields, got {type(value).__name__}")
    assert is_dataclass(cls)
    known = {f.name for f in fields(cls)}
    if unknown := sorted(set(value) - known):
        raise UserError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    hints = get_type_hints(cls)
    return cls(**{name: _nested(hints[name], v) for name, v in value.items()})


def _nested(hint: Any, value: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        if is_dataclass(option) and isinstance(option, type) and isinstance(value, Mapping):
            return as_config(option, value)
        if get_origin(option) is tuple and isinstance(value, list):
            return tuple(value)
    return value
