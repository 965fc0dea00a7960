"""Errors a user can mend, told in one line: what was given, what is accepted, which key was probably meant."""

from __future__ import annotations

import difflib
import dis
import re
from collections.abc import Iterable

from alignment.errors import UserError

PACKAGES = ("alignment", "modules", "datamodules", "callbacks")
_LONGEST = 400

_KEY = re.compile(r'Parser key "([^"]+)":?\s*(.*)')
_UNKNOWN = re.compile(
    r"(?:Option|(?:Group|Subcommand) '[^']*' does not accept option) '([^']+)'|unrecognized arguments: -*([^\s=]+)"
)
_HINT = re.compile(r"\(did you mean '([^']+)'\?\)")
_NOT_A_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NOISE = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>"
    r"|Problem with given class|Not a valid subclass of|Subclass types expect one of|a class path \(str\)"
    r"|a dict with|tip: "
)


class CommandLineError(Exception):
    """The command line or a configuration file cannot be used. The text is one line.

    Not a ValueError: jsonargparse would catch it and try another alternative of the type.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """White space collapsed and the length bounded, so that a message is one line whatever it quotes."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def suggest(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` probably meant: the closest as a whole, else by its first part, else by its last."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return close[0]
    first, dot, rest = key.partition(".")
    close = difflib.get_close_matches(first, {k.partition(".")[0] for k in known}, n=1)
    if close and dot:
        return f"{close[0]}.{rest}"
    last = {k.rpartition(".")[2]: k for k in reversed(known)}
    close = difflib.get_close_matches(key.rpartition(".")[2], last, n=1)
    return last[close[0]] if close else None


def add_hint(message: str, known: Iterable[str]) -> str:
    """`message` of a parser, with a suggestion when it complains of an unknown key. `known`: the parser's own keys."""
    unknown = _UNKNOWN.search(message)
    if unknown is None or _HINT.search(message):
        return message
    meant = suggest(unknown[1] or unknown[2], known)
    return f"{message} (did you mean '{meant}'?)" if meant else message


def explain(message: str, class_names: Iterable[str] = ()) -> str:
    """One line from jsonargparse's nested report: the full key, then what is wrong with it.

    The report lists what every alternative of a type had to say; the first alternative that got furthest is the one the
    user meant. `class_names`: names to look through when a class was not found.
    """
    path: list[str] = []
    reasons: list[str] = []
    given: str | None = None
    for raw in message.splitlines():
        line = raw.strip().removeprefix("- ")
        key = _KEY.match(line)
        if key:
            if not reasons:
                path += [key[1]] if path[-1:] != [key[1]] else []
            line = key[2]
        unknown = _UNKNOWN.search(line)
        if unknown:
            return _unknown_key([*path, unknown[1] or unknown[2]], _HINT.search(line))
        missing = _NOT_A_CLASS.search(line)
        if missing:
            meant = suggest(missing[1], class_names)
            hint = f"; did you mean '{meant}'?" if meant else ", neither a known name nor an importable path"
            return f"{_prefix(path)}no class '{missing[1]}'{hint}"
        if line.startswith("Given value: ") and given is None:
            given = line.removeprefix("Given value: ")
        if line and not _NOISE.match(line):
            reasons.append(_readable(line))
    return one_line(_prefix(path) + (_joined(list(dict.fromkeys(reasons)), given) or message))


def _joined(reasons: list[str], given: str | None) -> str:
    """The reasons in a row; several 'expected ...' become one, followed by what was given."""
    expected = [r.removeprefix("expected ") for r in reasons if r.startswith("expected ") and ", got " not in r]
    if len(expected) > 1 and len(expected) == len(reasons):
        return f"expected {' or '.join(expected)}, got {given}"
    return "; ".join(reasons)


def _unknown_key(path: list[str], hint: re.Match[str] | None) -> str:
    text = f"unknown key '{'.'.join(path)}'"
    return f"{text}; did you mean '{'.'.join([*path[:-1], hint[1]])}'?" if hint else text


def _prefix(path: list[str]) -> str:
    return ".".join(path) + ": " if path else ""


def _readable(text: str) -> str:
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"typing\.Literal\[([^\]]*)\]", r"one of \1", text)
    text = re.sub(r"Expected an? ", "expected ", text)
    return text.replace(". Got value: ", ", got ")


def is_for_user(ex: BaseException) -> bool:
    """True for a UserError, and for a `raise ValueError`, `OSError` or `ImportError` statement in our own packages.

    That is the house rule: such an error says what was given, what is accepted and what to do. The same types raised by
    an expression (`int("x")`) or by a library are bugs, and keep their traceback.
    """
    if isinstance(ex, UserError):
        return True
    if not isinstance(ex, (ValueError, OSError, ImportError)) or ex.__traceback__ is None:
        return False
    place = ex.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    code, package = place.tb_frame.f_code, str(place.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in PACKAGES and dis.opname[code.co_code[place.tb_lasti]] == "RAISE_VARARGS"
