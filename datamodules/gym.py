"""Prompts from the procedural generators of `reasoning-gym`, by task list and level.

    reasoning-gym:products@0,gcd@0-2,chain_sum

asks for products of level 0, greatest common divisors of levels 0, 1 and 2, and sums as the generator makes them by
default. Level n is the generator's own curriculum with every attribute at its n-th step (the last one where it has
fewer), that step alone: level 2 holds no instance of level 0. Rows take turns between the parts of the list. A row has
the columns `question`, `answer`, `task`, `level` and `metadata`: what the task's scorer needs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

from alignment.errors import UserError
from datamodules.rows import RowError

PREFIX = "reasoning-gym:"
ROWS = 2_000  # where nothing says how many
_PART = re.compile(r"([a-z0-9_]+)(?:@(\d+)(?:-(\d+))?)?")

Part = tuple[str, int | None]


def parts_of(path: str) -> list[Part]:
    """(task, level) pairs of a path; level None where none is given. Raises UserError for anything else."""
    parts: list[Part] = []
    for text in path.removeprefix(PREFIX).split(","):
        match = _PART.fullmatch(text.strip())
        if match is None:
            raise UserError(f"'{path}': expected {PREFIX}TASK, TASK@LEVEL or TASK@FIRST-LAST, ..., found '{text}'")
        task, first, last = match.groups()
        if first is None:
            parts.append((task, None))
            continue
        levels = range(int(first), int(last or first) + 1)
        if not levels:
            raise UserError(f"'{path}': the levels {first}-{last} of '{task}' are none")
        parts += [(task, level) for level in levels]
    return parts


class Generators:
    """The generators behind a path; `rows` makes the instances.

    Args:
        path: see the module docstring.
        size: rows in total.
    """

    def __init__(self, path: str, size: int | None) -> None:
        self.size = ROWS if size is None else size
        self._parts = parts_of(path)
        gym = _import()
        each = -(-self.size // len(self._parts))
        self._data = [_dataset(gym, task, level, each) for task, level in self._parts]
        key = json.dumps([path, self.size, version("reasoning_gym")])
        self.digest = hashlib.sha256(key.encode()).hexdigest()

    def rows(self) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
        """(place, row) pairs; a RowError for an instance that its generator fails to make."""
        for i in range(self.size):
            turn, which = divmod(i, len(self._parts))
            task, level = self._parts[which]
            place = f"row {i + 1}"
            try:
                entry = self._data[which][turn]
            except (ValueError, AssertionError, ArithmeticError, LookupError) as error:
                yield place, RowError("the generator failed", f"{task}: {error}")
                continue
            named = {name: entry[name] for name in ("question", "answer", "metadata")}
            named = json.loads(json.dumps(named))  # as it comes back from the cache: tuples are lists
            prompt = [{"role": "user", "content": named["question"]}]
            yield place, {"prompt": prompt, **named, "task": task, "level": 0 if level is None else level}


def _import() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError(
            f"'{PREFIX}...' needs the package reasoning-gym: pip install 'lightning-alignment[rewards]'"
        ) from error


def _dataset(gym: ModuleType, task: str, level: int | None, size: int) -> Any:
    """The generator of a task at a level. Instances are a function of their position alone."""
    known = gym.factory.DATASETS
    if task not in known:
        raise UserError(f"reasoning-gym has no task '{task}'; it has {', '.join(sorted(known))}")
    settings = {"seed": 0, "size": size}
    try:
        if level is None:
            return gym.create_dataset(task, **settings)
        if not gym.factory.has_curriculum(task):
            raise UserError(f"the reasoning-gym task '{task}' has no levels; leave '@{level}' out")
        curriculum = gym.factory.create_curriculum(task)
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
        steps = importlib.import_module("reasoning_gym.coaching.base_curriculum")
        alone = steps.DefaultCurriculumContext(mode=steps.RangeAttributeMode.UPPER_BOUND)
        return known[task][0](curriculum.generate_configuration(settings, context=alone))
    except AssertionError as error:
        raise UserError(f"reasoning-gym cannot make '{task}' at level {level}: {error}") from error
