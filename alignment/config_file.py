"""Mistakes of a configuration file as a whole, told with the file's name before its settings are looked at."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

import yaml

from alignment.cli_errors import CommandLineError

_NULL = re.compile(r"--(model|data)((?:\.\w+){2,})(?:=(null|~))?")


def with_nulls(words: Sequence[str]) -> list[str]:
    """Words in which `--model.policy.tokenizer=null` is a piece of configuration: as a flag jsonargparse makes the text
    'None' of it where a setting lies inside another one."""
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag = _NULL.fullmatch(word)
        if flag is None or (flag[3] is None and rest[:1] not in (["null"], ["~"])):
            found.append(word)
            continue
        if flag[3] is None:
            rest.pop(0)
        value: object = None
        for part in reversed([part for part in flag[2].split(".")[1:] if part != "init_args"]):
            value = {part: value}
        found += ["--config", json.dumps({flag[1]: {"init_args": value}})]
    return found


def check_config_file(path: str | PathLike[str]) -> None:
    """Raises CommandLineError for a file that is not UTF-8, not YAML, no mapping, or that sets a key twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as ex:
        raise CommandLineError(f"'{path}' is not a text file in UTF-8: {ex.reason} at byte {ex.start}") from ex
    except OSError as ex:
        raise CommandLineError(f"'{path}' cannot be read: {ex.strerror}") from ex
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as ex:
        line = "" if ex.problem_mark is None else f" line {ex.problem_mark.line + 1}"
        tab = "; indent with spaces, YAML takes no tabs" if "'\\t'" in str(ex.problem) else ""
        raise CommandLineError(f"'{path}'{line} is not YAML: {ex.context or ''} {ex.problem}{tab}") from ex
    except yaml.YAMLError as ex:
        raise CommandLineError(f"'{path}' is not YAML: {ex}") from ex
    if not isinstance(root, yaml.MappingNode):
        found = "holds no settings" if root is None else "is no mapping of settings"
        raise CommandLineError(f"'{path}' {found}; a configuration looks like 'trainer: {{max_steps: 10}}'")
    for key in _repeated(root, set()):
        place = key.start_mark.line + 1
        raise CommandLineError(f"'{path}' line {place} sets '{key.value}' again; join the two, the first would be lost")


def _repeated(node: yaml.Node, seen: set[int]) -> Iterator[yaml.ScalarNode]:
    """Keys that their mapping has already, at any depth. `seen`: nodes looked at, for anchors that hold themselves."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value, seen)
        return
    names: set[str] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in names:
                yield key
            names.add(key.value)
        yield from _repeated(value, seen)


def of_a_run(words: Sequence[str]) -> list[str]:
    """The words of a command line with `--config FILE` for `--trainer FILE` where the file has settings of a whole run,
    those of the trainer below `trainer`: files that shard set callbacks and the policy too."""
    found = list(words)
    for place, word in enumerate(words):
        option, given, value = word.partition("=")
        if option == "--trainer" and given and _has_trainer(value):
            found[place] = f"--config={value}"
        elif word == "--trainer" and _has_trainer("".join(words[place + 1 : place + 2])):
            found[place] = "--config"
    return found


def _has_trainer(path: str) -> bool:
    """Whether a file has the key `trainer`. What is wrong with it is told by whoever reads it."""
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(root, yaml.MappingNode) and any(key.value == "trainer" for key, _ in root.value)
