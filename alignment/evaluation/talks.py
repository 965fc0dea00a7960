"""A conversation that a model is asked to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignment.chat import Message


@dataclass(slots=True, kw_only=True)
class Talk:
    """One conversation: what the user says, what the model said, and the right answers where they are known."""

    name: str
    category: str
    turns: Sequence[str]
    references: Sequence[str]
    replies: list[str] = field(default_factory=list)

    def messages(self, turn: int) -> list[Message]:
        """Up to the user's message of that turn."""
        found = []
        for text, reply in zip(self.turns[:turn], self.replies, strict=False):
            found += [Message("user", text), Message("assistant", reply)]
        return [*found, Message("user", self.turns[turn])]

    def question(self, turn: int) -> str:
        """What the judge reads before the reply of that turn."""
        lines = [f"{message.role.capitalize()}: {message.content}" for message in self.messages(turn)]
        if turn < len(self.references):
            lines.append(f"(Reference answer, which the assistant has not seen: {self.references[turn]})")
        return "\n\n".join(lines)
