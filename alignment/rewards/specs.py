"""Reading and checking what a run says about its rewards, and finding the values their parameters stand for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from alignment import rewards
from alignment.errors import UserError
from alignment.named import import_path
from alignment.rewards import SHIPPED
from alignment.rewards.calls import BATCH, SINGLE, Function, Source, Wanted, check_arguments, describe, load, wanted
from alignment.rewards.lookup import look_up
from alignment.rewards.protocol import Condition, RewardSpec, Samples, SuiteConfig
from alignment.settings import as_config

AnySpec = RewardSpec | Mapping[str, Any] | str | Callable[..., Any]


def to_spec(given: AnySpec) -> RewardSpec:
    if isinstance(given, RewardSpec | Mapping):
        return as_config(RewardSpec, given)
    return RewardSpec(reward=given)


def check(specs: Mapping[str, RewardSpec], config: SuiteConfig) -> None:
    """Raise UserError for settings that cannot work, naming reward and setting."""
    if not specs:
        raise UserError("no rewards are given; name at least one")
    if config.workers < 1:
        raise UserError(f"workers is {config.workers}; there must be at least one")
    if config.memory_mb < 1:
        raise UserError(f"memory_mb is {config.memory_mb}; a worker needs at least 1")
    if not 0 <= config.fault_limit <= 1 or config.fault_window < 1:
        raise UserError("fault_limit is a share from 0 to 1, and fault_window at least one batch")
    if not 0 < config.load_timeout_s < math.inf:
        raise UserError(f"load_timeout_s is {config.load_timeout_s}; it must be positive")
    for name, spec in specs.items():
        if not math.isfinite(spec.weight):
            raise UserError(f"reward '{name}': weight is {spec.weight}; it must be finite")
        _check_name(name, spec.reward)
        if not name or "/" in name:
            raise UserError(f"'{name}' cannot be the name of a reward: it names a metric, so it has no '/'")
        if not spec.timeout_s > 0:
            raise UserError(f"reward '{name}': timeout_s is {spec.timeout_s}; it must be positive")
        if spec.batch_size is not None and spec.batch_size < 1:
            raise UserError(f"reward '{name}': batch_size is {spec.batch_size}; it must be positive, or null")
        if isinstance(spec.scale, str) and spec.scale != "running":
            raise UserError(f"reward '{name}': scale is '{spec.scale}'; use [low, high], running, or null")
        if isinstance(spec.scale, tuple) and not (
            len(spec.scale) == 2 and -math.inf < spec.scale[0] < spec.scale[1] < math.inf
        ):
            given = list(spec.scale)
            raise UserError(f"reward '{name}': scale is {given}; it is [low, high] with low below high, both finite")
        if spec.condition is not None:
            _check_condition(name, spec.condition, specs)
    for name, spec in specs.items():
        _check_there(name, spec)


def _check_name(name: str, reward: str | Callable[..., Any]) -> None:
    """That a name without a dot is a reward of ours, which is known before anything is imported."""
    if not isinstance(reward, str) or "." in reward or reward in SHIPPED:
        return
    near = get_close_matches(reward, SHIPPED, n=1)
    there = f"there are {', '.join(SHIPPED)}, and your own as my_file.my_reward"
    hint = f"did you mean '{near[0]}'?" if near else there
    raise UserError(f"reward '{name}': there is no '{reward}'; {hint}")


def _check_there(name: str, spec: RewardSpec) -> None:
    """That there is such a reward, as far as that is told without running code of the user's."""
    if not isinstance(spec.reward, str):
        return
    try:
        if "." in spec.reward:
            look_up(spec.reward)
        else:
            check_arguments(getattr(rewards, spec.reward), spec.args)
    except UserError as error:
        raise UserError(f"reward '{name}' cannot be loaded: {error}") from error


def _check_condition(name: str, condition: Condition, specs: Mapping[str, RewardSpec]) -> None:
    other = condition.reward
    if math.isnan(condition.at_least):
        raise UserError(f"reward '{name}': its condition has at_least {condition.at_least}, which nothing reaches")
    if other == name:
        raise UserError(f"reward '{name}' is conditioned on itself")
    if other not in specs:
        near = get_close_matches(other, specs, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(specs)}"
        raise UserError(f"reward '{name}' is conditioned on '{other}', which is not a reward; {hint}")


def source_of(name: str, spec: RewardSpec) -> Source:
    """What a worker needs to find the reward again."""
    if isinstance(spec.reward, str):
        return spec.reward, spec.args
    path = import_path(spec.reward)
    if path is None:
        where = f"{getattr(spec.reward, '__module__', '')}.{getattr(spec.reward, '__qualname__', '<object>')}"
        raise UserError(
            f"reward '{name}' is a callable that a worker cannot import ({where}); put it at the top of a file, or set "
            "in_process: true"
        )
    return path, spec.args


def load_here(name: str, spec: RewardSpec) -> tuple[Function, Wanted]:
    try:
        function = load((spec.reward, spec.args)) if isinstance(spec.reward, str) else spec.reward
        return function, wanted(function)
    except UserError as error:
        raise UserError(f"reward '{name}' cannot be loaded: {error}") from error
    except Exception as error:  # the user's own code: it may raise anything
        raise UserError(f"reward '{name}' cannot be loaded: {describe(error)}") from error


def check_columns(name: str, wants: Wanted, known: Collection[str]) -> None:
    """Raise UserError for a data column that a reward needs and that no row has."""
    fields = {*BATCH, *SINGLE}
    for column in (*wants.columns, *(p for p in wants.names if p not in fields and p not in wants.optional)):
        _check_column(name, column, [dict.fromkeys(known)])


def bind(name: str, wants: Wanted, samples: Samples) -> dict[str, Sequence[Any]]:
    """What a reward's parameters stand for, N values each. Raises UserError for one that is required and not known."""
    plain = dict(zip(SINGLE if wants.per_sample else BATCH, BATCH, strict=True))
    rows = samples.columns or [{}] * len(samples)
    for column in wants.columns:
        _check_column(name, column, rows)
    arguments: dict[str, Sequence[Any]] = {}
    for parameter in wants.names:
        if parameter == "columns":
            arguments[parameter] = rows
        elif parameter in plain:
            values = getattr(samples, plain[parameter])
            if values is not None:
                arguments[parameter] = values
            elif parameter not in wants.optional:
                raise UserError(f"reward '{name}' needs {parameter}, which these samples do not have")
        elif parameter not in wants.optional or any(parameter in row for row in rows):
            _check_column(name, parameter, rows)
            arguments[parameter] = [row.get(parameter) for row in rows]
    return arguments


def needed(wants: Wanted) -> set[str]:
    """The data columns without which `bind` raises."""
    known = SINGLE if wants.per_sample else BATCH
    return {*wants.columns, *(p for p in wants.names if p not in known and p not in wants.optional)}


def _check_column(name: str, column: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if not any(column in row for row in rows):
        known = ", ".join(sorted({c for row in rows for c in row})) or "none"
        raise UserError(f"reward '{name}' needs the data column '{column}'; the data's columns: {known}")


def digest(prompt: str, completion: str) -> str:
    """Digest of what is scored."""
    return hashlib.blake2b(f"{prompt}\x1f{completion}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
