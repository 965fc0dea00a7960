"""Settings of rewards, sampling and policy as a run gives them: `-c FILE`, and dotted flags with YAML values.

    -c configs/grpo.yaml                          the rewards, sampling, scoring and policy of a run
    --rewards.right.reward ExactMatch             one setting
    --rewards '{right: {reward: ExactMatch}}'     a mapping in place of the file's

Files and flags are joined in order: a later value wins key by key, and a mapping of rewards replaces the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from alignment.cli_errors import suggest
from alignment.config_file import check_config_file
from alignment.errors import UserError

ROOTS = ("rewards", "sampling", "scoring", "policy")
_ALSO = ("success",)
FILE_FLAGS = ("-c", "--config")


def take(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(settings from files and dotted flags among the words, the other words).

    Raises UserError for a flag without a value, a value that is no YAML, and a file with other settings.
    """
    found: dict[str, Any] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, text = word.partition("=")
        path = flag.removeprefix("--").split(".") if flag.startswith("--") else []
        if flag not in FILE_FLAGS and (not path or path[0] not in ROOTS):
            rest.append(word)
            continue
        if not equals:
            if not left:
                raise UserError(f"{flag} is given without a value")
            text = left.pop(0)
        if flag in FILE_FLAGS:
            _join(found, of_file(text))
        else:
            _set(found, path, _value(flag, text), flag)
    return found, rest


def of_file(path: str) -> dict[str, Any]:
    """What a configuration file says: a run's, of which only `ROOTS` are read, or one of nothing else.

    Raises CommandLineError for a file that is none, UserError for one that holds other settings.
    """
    check_config_file(path)
    with open(path, encoding="utf-8") as file:
        values: dict[str, Any] = yaml.safe_load(file)
    model = values.get("model")
    if model is not None:
        settings = model.get("init_args", model) if isinstance(model, Mapping) else None
        if not isinstance(settings, Mapping):
            raise UserError(f"'{path}': model is no mapping of settings, so it names no rewards")
        return {name: settings[name] for name in (*ROOTS, *_ALSO) if settings.get(name) is not None}
    for name in values:
        if name not in (*ROOTS, *_ALSO):
            meant = suggest(str(name), (*ROOTS, *_ALSO))
            hint = f"did you mean '{meant}'?" if meant else f"it takes {', '.join((*ROOTS, *_ALSO))}, or a run's model"
            raise UserError(f"'{path}' has a setting '{name}', which is not used here; {hint}")
    return values


def mapping(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings below `name`, {} where there are none. Raises UserError for anything but a mapping."""
    value = settings.get(name, {})
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}; give a mapping of its settings")
    return dict(value)


def _join(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        old = found.get(name)
        if name != "rewards" and isinstance(old, Mapping) and isinstance(value, Mapping):
            found[name] = {**old, **value}
        else:
            found[name] = value


def _set(found: dict[str, Any], path: Sequence[str], value: Any, flag: str) -> None:
    if "" in path:
        raise UserError(f"{flag} is no setting; write --rewards.NAME.reward VALUE")
    place = found
    for position, name in enumerate(path[:-1]):
        below = place.get(name)
        if isinstance(below, str) and path[0] == "rewards" and position == 1:
            below = {"reward": below}  # the short form of a reward
        if below is not None and not isinstance(below, dict):
            raise UserError(f"{flag}: {'.'.join(path[: position + 1])} is {below!r}, which has no settings")
        place[name] = dict(below or {})
        place = place[name]
    place[path[-1]] = value


def _value(flag: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{flag} is '{text}', which is not YAML: {error}") from error
