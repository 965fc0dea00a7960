"""Pieces of raw rows: roles, messages, conversations, prompts. Everything here raises RowError with a reason when a
value cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.chat import Message
from datamodules.rows import RowError, text

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def _content(value: object) -> str:
    """A message's text: a string, or parts such as `[{"type": "text", "value": "Hi"}]`."""
    if not isinstance(value, list):
        return text(value, "message")
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError("message holds a part that is not text", str(kind))
        parts.append(text(part.get("text", part.get("value")), "message"))
    return text("".join(parts), "message")


def role_of(message: Mapping[str, Any]) -> str | None:
    """Our name for the role of a raw message; None for one that we do not know."""
    role = message.get("role", message.get("from"))
    return _ROLES.get(role) if isinstance(role, str) else None


def _message(value: object) -> Message:
    if not isinstance(value, dict):
        raise RowError("message has the wrong type", f"{type(value).__name__}, expected an object")
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise RowError("message has an unknown role", repr(role))
    return Message(_ROLES[role], _content(content))


def messages_of(value: object, name: str) -> tuple[Message, ...]:
    """A list of messages, whichever names it uses for roles and contents. `name` is the column, for reasons."""
    if value is None:
        raise RowError(f"{name} is None")
    if not isinstance(value, list):
        raise RowError(f"{name} has the wrong type", f"{type(value).__name__}, expected messages")
    if not value:
        raise RowError(f"{name} is empty")
    # An empty system message is how some sources say that there is none.
    empty_system = [
        isinstance(m, dict) and m.get("role", m.get("from")) == "system" and m.get("content", m.get("value")) == ""
        for m in value
    ]
    return tuple(_message(m) for m, empty in zip(value, empty_system, strict=True) if not empty)


def conversation(messages: tuple[Message, ...], name: str) -> tuple[tuple[Message, ...], str]:
    """(prompt, last assistant turn) of a whole conversation."""
    if not messages or messages[-1].role != "assistant":
        raise RowError(f"{name} does not end with the assistant")
    if all(m.role != "user" for m in messages):
        raise RowError(f"{name} has no user turn")
    return messages[:-1], messages[-1].content


def prompt_of(row: Mapping[str, Any], name: str = "prompt") -> tuple[Message, ...]:
    """Column `name` as a prompt: messages that end with somebody else than the assistant, or one text of a user."""
    if isinstance(row.get(name), list):
        messages = messages_of(row[name], name)
        if all(m.role != "user" for m in messages):
            raise RowError(f"{name} has no user turn")
        if messages[-1].role == "assistant":
            raise RowError(f"{name} ends with the assistant")
        return messages
    return (Message("user", text(present(row, name), name)),)


def present(row: Mapping[str, Any], name: str) -> Any:
    """The value of column `name`, which must be there."""
    if name not in row:
        raise RowError(f"key '{name}' is missing")
    return row[name]


def with_system(row: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages behind the row's `system` text, where it has one and they do not."""
    system = row.get("system")
    if system in (None, "") or (messages and messages[0].role == "system"):
        return messages
    return (Message("system", text(system, "system")), *messages)


def instruction(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """`instruction`, with `input` below it where there is one, as a user's message."""
    asked = text(present(row, "instruction"), "instruction")
    given = row.get("input")
    if given not in (None, ""):
        asked += "\n\n" + text(given, "input")
    return (Message("user", asked),)
