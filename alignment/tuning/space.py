"""What a search may change: dotted keys of the configuration, each with a range or with choices.

    model.optim.lr: {low: 1.0e-6, high: 1.0e-4, log: true}
    model.beta: {around: 0.2}                 # the configuration's own value, 20 % less to 20 % more
    data.batch_size: {choices: [16, 32, 64]}
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alignment.cli_errors import suggest
from alignment.errors import UserError

Value = Any
"""A scalar that YAML can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, whole ones where both are. `log`: equal ratios are equally likely."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def within(self, value: float) -> float:
        """The nearest number of the range."""
        nearest = min(max(value, self.low), self.high)
        return round(nearest) if self.whole else nearest

    def draw(self, source: random.Random) -> float:
        if self.log:
            return self.within(math.exp(source.uniform(math.log(self.low), math.log(self.high))))
        return source.randint(int(self.low), int(self.high)) if self.whole else source.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """One of some values."""

    values: tuple[Value, ...]

    def draw(self, source: random.Random) -> Value:
        return source.choice(self.values)


Dimension = Range | Choices
Space = Mapping[str, Dimension]


def read(paths: Sequence[Path], config: Mapping[str, Any]) -> dict[str, Dimension]:
    """The space of some YAML files over a resolved configuration; of a key in several the last file counts.

    Raises UserError for a key that the configuration has not, and for a dimension that is none.
    """
    found: dict[str, Dimension] = {}
    for path in paths:
        for key, given in _mapping(path).items():
            found[key] = _dimension(f"{path}: {key}", given, value_of(config, key, str(path)))
    if not found:
        raise UserError(f"no settings to search in {', '.join(map(str, paths))}")
    return found


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the space '{path}': {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UserError(f"'{path}' is no space: give settings with their ranges, as in configs/tune/learning_rate.yaml")
    return found


def _dimension(where: str, given: Any, own: Value) -> Dimension:
    if not isinstance(given, dict):
        raise UserError(f"{where} is {given!r}; give {{low, high, log}}, {{choices}} or {{around}}")
    names = set(given)
    if names == {"choices"} and isinstance(given["choices"], list) and len(given["choices"]) > 1:
        return Choices(values=tuple(given["choices"]))
    if names == {"around"} and _number(given["around"]) and 0 < given["around"] < 1:
        if not _number(own) or own <= 0:
            raise UserError(f"{where}: around is for positive numbers, and the configuration has {own!r}")
        return Range(low=own * (1 - given["around"]), high=own * (1 + given["around"]))
    if {"low", "high"} <= names <= {"low", "high", "log"} and _number(given["low"]) and _number(given["high"]):
        found = Range(low=given["low"], high=given["high"], log=bool(given.get("log", False)))
        if found.low >= found.high or (found.log and found.low <= 0):
            got = f"{found.low:g} and {found.high:g}"
            raise UserError(f"{where}: low must be below high, and above 0 with log; got {got}")
        return found
    raise UserError(f"{where} is {given}; give {{low, high, log}}, {{choices}} with two or more, or {{around: 0.2}}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def value_of(config: Mapping[str, Any], key: str, where: str) -> Value:
    """The configuration's own value of a dotted key, `init_args` left out. Raises UserError for a key it has not."""
    inner: Any = config
    for part in key.split("."):
        inner = _settings(inner)
        if not isinstance(inner, Mapping) or part not in inner:
            known = list(_keys(config))
            meant = suggest(key, known)
            hint = f"; did you mean '{meant}'?" if meant else ""
            raise UserError(f"{where}: the configuration has no setting '{key}'{hint}")
        inner = inner[part]
    return inner


def _settings(value: Any) -> Any:
    """Those of a class, in place of its path and them."""
    return value.get("init_args") or {} if isinstance(value, Mapping) and "class_path" in value else value


def _keys(value: Any, key: str = "") -> Sequence[str]:
    inner = _settings(value)
    if not isinstance(inner, Mapping) or not inner:
        return [key] if key else []
    return [found for name, below in inner.items() for found in _keys(below, f"{key}.{name}" if key else str(name))]


def overlay(config: Mapping[str, Any], values: Mapping[str, Value]) -> dict[str, Any]:
    """A YAML fragment that changes only `values`, with `init_args` where the configuration has them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        into, known = found, config
        for part in above:
            into, known = _into(into, known, part)
        if "class_path" in known:
            into = into.setdefault("init_args", {})
        into[last] = value
    return found


def _into(into: dict[str, Any], known: Any, part: str) -> tuple[dict[str, Any], Any]:
    if isinstance(known, Mapping) and "class_path" in known:
        into, known = into.setdefault("init_args", {}), known.get("init_args") or {}
    return into.setdefault(part, {}), known.get(part) or {}
