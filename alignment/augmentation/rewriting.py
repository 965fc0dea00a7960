"""A row with another prompt, or another rejected reply, in the format it came in: every other value stays as it was.

What a rewritten row means is read back by the same parser and compared with what was asked for, so a format that would
not give exactly that back refuses the row instead of writing a wrong one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from alignment.augmentation.rows import Entry, Rows, asked, asking
from datamodules.formats import Format, Row
from datamodules.messages import role_of
from datamodules.rows import RowError

_TEXTS = ("prompt", "question", "text")
_ANSWER = "\n\nAssistant:"  # of transcripts that are one text
_BETWEEN = "\n\n"  # what the reader puts between an instruction and its input


def rewritten(
    rows: Rows, entry: Entry, *, prompt: str | None = None, rejected: str | None = None
) -> tuple[dict[str, Any], Row]:
    """(values, their meaning) of a copy of the row.

    Args:
        prompt: what the last turn of the user says. rejected: the rejected reply. None: as it was.

    Raises RowError where the row's format cannot hold that.
    """
    fmt, row = rows.format, entry.row
    values = copy.deepcopy(dict(entry.values))
    if rejected is not None:
        _set_rejected(values, fmt, row, rejected)
    if prompt is not None:
        _set_prompt(values, fmt, row, prompt)
    found = fmt.parse(values, rows.purpose, rows.known)
    wanted = row.prompt if prompt is None else asking(row, prompt)
    replies = row.completions if rejected is None else (row.completions[0], rejected)
    if found.prompt != wanted or found.completions != replies:
        raise RowError("its format cannot hold the new text")
    return values, found


def data_part(rows: Rows, entry: Entry) -> tuple[str, str]:
    """(what stands before it, the part of the user's last turn that holds data): the `input` below an instruction where
    the row has one, else the whole turn. Joined they are the turn."""
    if "instruction" in rows.format.needs:
        given = entry.values.get(rows.format.columns.get("input", "input"))
        if isinstance(given, str) and given and entry.asked.endswith(_BETWEEN + given):
            return entry.asked[: -len(given)], given
    return "", entry.asked


# ---------------------------------------------------------------------- prompts


def _set_prompt(values: dict[str, Any], fmt: Format, row: Row, text: str) -> None:
    pair = fmt.needs == ("chosen", "rejected")
    for ours in fmt.needs:
        name = fmt.columns.get(ours, ours)
        value = values[name]
        if isinstance(value, list):
            values[name] = _with_last_user(value, text)
        elif ours == "instruction":
            _set_instruction(values, fmt, name, text)
        elif ours in _TEXTS:
            values[name] = text
        elif pair and isinstance(value, str):
            values[name] = _with_asked(value, row, text)


def _set_instruction(values: dict[str, Any], fmt: Format, name: str, text: str) -> None:
    """A text that begins with the row's instruction goes on in its `input`, one that ends with the row's input begins
    with its instruction; any other leaves `input` empty."""
    given = fmt.columns.get("input", "input")
    start = f"{values[name]}{_BETWEEN}"
    if values.get(given) in (None, ""):
        values[name] = text
    elif text.startswith(start):
        values[given] = text[len(start) :]
    elif text.endswith(end := f"{_BETWEEN}{values[given]}"):
        values[name] = text[: -len(end)]
    else:
        values[name], values[given] = text, ""


def _with_last_user(messages: Sequence[Any], text: str) -> list[Any]:
    """A copy whose last message of a user says `text`."""
    turns = list(messages)
    for place in range(len(turns) - 1, -1, -1):
        if isinstance(turns[place], dict) and role_of(turns[place]) == "user":
            turns[place] = _saying(turns[place], text)
            break
    return turns


def _saying(message: dict[str, Any], text: str) -> dict[str, Any]:
    name = "content" if message.get("content") is not None else "value"
    old = message.get(name)
    if isinstance(old, list):  # typed parts
        part = "text" if isinstance(old[0], dict) and "text" in old[0] else "value"
        return {**message, name: [{"type": "text", part: text}]}
    return {**message, name: text}


def _with_asked(transcript: str, row: Row, text: str) -> str:
    """A whole transcript, of a prompt in turns or of one text, with another last turn of the user."""
    if isinstance(row.prompt, str):
        return text + transcript[len(row.prompt) :]
    before, mark, after = transcript.rpartition(_ANSWER)
    old = asked(row)
    place = before.rfind(old)
    if place < 0:
        raise RowError("its format cannot hold the new text")
    return before[:place] + text + before[place + len(old) :] + mark + after


# ---------------------------------------------------------------------- replies


def _set_rejected(values: dict[str, Any], fmt: Format, row: Row, text: str) -> None:
    ours = next(name for name in fmt.needs if name.startswith("rejected"))
    name = fmt.columns.get(ours, ours)
    value = values[name]
    if isinstance(value, list):
        values[name] = [*value[:-1], _saying(value[-1], text)]
    elif isinstance(value, dict):
        values[name] = _saying(value, text)
    elif fmt.needs != ("chosen", "rejected"):
        values[name] = text
    elif isinstance(row.prompt, str):
        values[name] = row.prompt + text
    else:
        before, mark, _ = value.rpartition(_ANSWER)
        values[name] = f"{before}{mark} {text}"
