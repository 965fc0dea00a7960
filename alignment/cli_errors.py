"""Errors a user can mend, told in one line: what was given, what is accepted, which key was probably meant."""

from __future__ import annotations

import difflib
import dis
import re
import sys
from collections.abc import Collection, Iterable, Mapping

from alignment.errors import UserError

PACKAGES = ("alignment", "modules", "datamodules", "callbacks")
_LONGEST = 400

_KEY = re.compile(r'Parser key "([^"]+)":?\s*(.*)')
_UNKNOWN = re.compile(
    r"(?:Option|(?:Group|Subcommand) '[^']*' does not accept option) '([^']+)'|unrecognized arguments: -*([^\s=]+)"
)
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_HINT = re.compile(r"\(did you mean '([^']+)'\?\)")
_NO_OPTION = re.compile(r"unrecognized arguments: ([^-\s]\S*)")
_NO_VALUE = re.compile(r"argument (?:-\w/)?(--\S+): expected one argument")
_IMPORTED = re.compile(r"Expected a path but (\S+) either not accessible or invalid")
_NO_ATTRIBUTE = re.compile(r"module '([^']+)' has no attribute '([^']+)'")
_NO_LOADER = re.compile(r"`(train|val|test|predict)_dataloader` must be implemented")
_TWINS = re.compile(r"Found more than one stateful callback of type `(\w+)`")
_WANTS_SETTINGS = re.compile(r"Not a valid subclass of (\w+)$")
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
    """The known key that `key` probably meant: the closest as a whole, else by its first part, else by its last. Never
    one that is not known."""
    known = list(known)
    first, dot, rest = key.partition(".")
    firsts = {k.partition(".")[0] for k in known}
    if dot and first not in firsts and (close := difflib.get_close_matches(first, firsts, n=1)):
        near = difflib.get_close_matches(f"{close[0]}.{rest}", known, n=1, cutoff=0.85)
        if near or close[0] in known:
            return near[0] if near else close[0]
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return close[0]
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


def explain(
    message: str,
    class_names: Iterable[str] = (),
    import_error: str | None = None,
    settings: Mapping[str, Collection[str]] | None = None,
) -> str:
    """One line from jsonargparse's nested report: the full key, then what is wrong with it.

    The report lists what every alternative of a type had to say; the first alternative that got furthest is the one the
    user meant. `class_names`: names to look through when a class was not found. `import_error`: what an import that
    failed behind the report has to say (`failed_import`). `settings`: class path -> the names of its settings.
    """
    class_names = list(class_names)
    if (word := _NO_OPTION.search(message)) is not None:
        return f"unexpected word '{word[1]}'; options start with --"
    if (option := _NO_VALUE.search(message)) is not None:
        return f"{option[1]}, or a setting below it, is given without a value"
    path: list[str] = []
    reasons: list[str] = []
    given: str | None = None
    wanted: str | None = None  # whose settings a value should have been
    chosen = ""  # the class whose settings are read
    depth = 0  # of the first reason: alternatives that failed further out are not what the user meant
    for raw in message.splitlines():
        indent = len(raw) - len(raw.lstrip())
        line = raw.strip().removeprefix("- ")
        key = _KEY.match(line)
        if key:
            if not reasons:
                path += [key[1]] if path[-1:] != [key[1]] else []
            line = key[2]
        if import_error is not None:
            continue
        owner = _OWNER.match(line)
        chosen = owner[1] if owner else chosen
        unknown = _UNKNOWN.search(line)
        if unknown:
            name = unknown[1] or unknown[2]
            others = _others(name.partition(".")[0].partition("=")[0], chosen, settings or {})
            return _unknown_key([*path, name], _HINT.search(line), others)
        missing = _NOT_A_CLASS.search(line)
        if missing:
            if missing[1] in class_names:
                return f"{_prefix(path)}class '{missing[1]}' is of another kind than is needed here"
            meant = suggest(missing[1], class_names)
            hint = f"; did you mean '{meant}'?" if meant else ", neither a known name nor an importable path"
            return f"{_prefix(path)}no class '{missing[1]}'{hint}"
        wants = _WANTS_SETTINGS.match(line)
        wanted = wants[1] if wants and wanted is None else wanted
        if line.startswith("Given value: ") and given is None:
            given = line.removeprefix("Given value: ")
        imported = _IMPORTED.match(line)
        if imported:
            given = imported[1]
        elif line and not _NOISE.match(line) and indent >= depth:
            depth = depth or indent
            reasons.append(_readable(line, given))
    if import_error is not None:
        return one_line(_prefix(path) + import_error)
    if not reasons and wanted is not None:
        reasons = [f"expected the settings of {wanted}, got {given}"]
    return one_line(_prefix(path) + (_joined(list(dict.fromkeys(reasons)), given) or message))


def _joined(reasons: list[str], given: str | None) -> str:
    """The reasons in a row; several 'expected ...' become one, followed by what was given."""
    expected = [r.removeprefix("expected ") for r in reasons if r.startswith("expected ") and ", got " not in r]
    if len(expected) > 1 and len(expected) == len(reasons):
        return f"expected {' or '.join(expected)}, got {given}"
    return "; ".join(reasons)


def _others(name: str, chosen: str, settings: Mapping[str, Collection[str]]) -> str:
    """Says that a setting belongs to other classes than the chosen one; "" where it belongs to none, or to it too."""
    having = sorted(path for path, names in settings.items() if name in names)
    if chosen not in settings or chosen in having or not having:
        return ""
    return f"; {chosen} has no {name}: it is a setting of {', '.join(having)}"


def _unknown_key(path: list[str], hint: re.Match[str] | None, others: str = "") -> str:
    text = f"unknown key '{'.'.join(path)}'"
    if others:
        return text + others
    return f"{text}; did you mean '{'.'.join([*path[:-1], hint[1]])}'?" if hint else text


def _prefix(path: list[str]) -> str:
    return ".".join(path) + ": " if path else ""


def failed_import(ex: BaseException | None) -> str | None:
    """What went wrong inside a file that was being imported, if that is what is behind an error; else None."""
    while ex is not None:
        if isinstance(ex, SyntaxError):
            return f"{ex.filename}, line {ex.lineno}: {ex.msg}"
        place, parsing = ex.__traceback__, False
        while place is not None:
            code = place.tb_frame.f_code
            if parsing and code.co_name == "<module>":  # the interpreter leaves no frame of the import itself
                return f"{code.co_filename}, line {place.tb_lineno}: {type(ex).__name__}: {ex}"
            parsing = parsing or "jsonargparse" in str(place.tb_frame.f_globals.get("__name__"))
            place = place.tb_next
        ex = ex.__cause__ or ex.__context__
    return None


def lightnings(message: str) -> str:
    """A mistake that Lightning found, in our words where its own are about code."""
    missing = _NO_LOADER.search(message)
    return f"there is no {missing[1]} data; name a datamodule with --data" if missing else message


def of_settings(message: str) -> str | None:
    """What a RuntimeError of Lightning's says of the user's settings; None where it is about something else."""
    if twins := _TWINS.match(message):
        what = f"trainer.callbacks has {twins[1]} twice, with nothing that a checkpoint could tell them apart by"
        return f"{what}; leave one of them out"
    return message if message.startswith("Early stopping conditioned on metric") else None


def _readable(text: str, given: str | None) -> str:
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"typing\.Literal\[([^\]]*)\]", r"one of \1", text)
    text = re.sub(r"Expected an? ", "expected ", text)
    text = re.sub(r"expected dict\b", "expected a mapping", text)
    text = re.sub(r"Unable to load config ['\"](.*)['\"]$", r"'\1' is neither a file that is there nor settings", text)
    text = re.sub(r"Import path (\S+ )?does not correspond", rf"{given} does not correspond", text) if given else text
    lacks = _NO_ATTRIBUTE.search(text)
    if lacks and lacks[1] in sys.modules:
        near = difflib.get_close_matches(lacks[2], dir(sys.modules[lacks[1]]), n=1)
        text += f"; did you mean '{lacks[1]}.{near[0]}'?" if near else ""
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
