"""New words for a prompt that ask the same, by rule or by a language model.

By rule: English openings and turns of phrase that change no fact. By a model: any causal language model is asked to
rewrite the prompt; what it writes must keep every number, every quoted text and every name of the prompt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from alignment.randomness import derive
from alignment.rollout import SamplingConfig


class Answer(NamedTuple):
    """What a model said, and whether the length limit ended it."""

    text: str
    truncated: bool


class Answers(Protocol):
    """A model that can be asked, as `alignment.augmentation.generation.Generator`."""

    def answers(
        self, prompts: Mapping[int, str], count: int, sampling: SamplingConfig, *, seed: int
    ) -> Mapping[int, Sequence[Answer]]:
        """`count` answers to each message, by the number that keys their draws; none where it cannot be asked."""
        ...


class Candidate(NamedTuple):
    """A new text, and how it was made."""

    text: str
    by: str


QUESTION_OPENINGS = (
    "Please tell me: {text}",
    "I have a question: {text}",
    "Can you help me with this? {text}",
    "I was wondering: {text}",
    "Here is what I would like to know: {text}",
    "Could you answer this for me? {text}",
)
REQUEST_OPENINGS = (
    "I need help with this: {text}",
    "Here is what I need: {text}",
    "Could you do this for me? {text}",
    "This is my request: {text}",
    "Please do the following: {text}",
)
PHRASES: tuple[tuple[str, str], ...] = (
    (r"\bWhat's\b", "What is"),
    (r"\bWhat is\b", "What's"),
    (r"\bHow do I\b", "How can I"),
    (r"\bHow can I\b", "How do I"),
    (r"\bCan you\b", "Could you"),
    (r"\bCould you\b", "Can you"),
    (r"\bcannot\b", "can't"),
    (r"\bcan't\b", "cannot"),
    (r"\bdo not\b", "don't"),
    (r"\bdon't\b", "do not"),
    (r"\bHow much is\b", "What is the price of"),
    (r"\bHow many\b", "What number of"),
    (r"\bI want to\b", "I would like to"),
    (r"\bI would like to\b", "I want to"),
    (r"^Give me\b", "Provide"),
    (r"^Provide\b", "Give me"),
    (r"^Rewrite\b", "Rephrase"),
    (r"^Describe\b", "Give a description of"),
    (r"^List\b", "Name"),
    (r"^Generate\b", "Create"),
    (r"^Create\b", "Generate"),
    (r"^Explain\b", "Please explain"),
    (r"^Translate\b", "Please translate"),
    (r"^Calculate\b", "Work out"),
    (r"^Write\b", "Please write"),
    (r"^Identify\b", "Point out"),
    (r"^Edit\b", "Please edit"),
    (r"^Evaluate\b", "Please evaluate"),
)
"""Turns of phrase that can stand for each other: (pattern, replacement)."""

ASK = (
    "Rewrite the following request in other words. Keep its meaning, its names and its numbers. Answer with the "
    "rewritten request only.\n\n{text}"
)
"""What a model is asked."""
SAMPLING: Mapping[str, float | int] = {"max_tokens": 128, "temperature": 0.8, "top_p": 0.95}
"""How a model's paraphrases are drawn where nothing else is said."""

_FACTS = re.compile(
    r"\d+(?:[.,:/]\d+)*"  # numbers, dates, times
    r"|\"[^\"\n]+\"|“[^”\n]+”|(?<!\w)'[^'\n]{2,}'(?!\w)"  # quoted texts
    r"|(?<=[a-z,;] )[A-Z]\w+"  # names: capitals inside a sentence
)
_LABEL = re.compile(r"\A(?:here is|here's|rewritten|paraphrased?|request|answer)\b[^\n:]{0,60}:\s*", re.IGNORECASE)
_QUOTES = {'"': '"', "“": "”", "'": "'", "`": "`"}


def by_rule(text: str, count: int, seed: int) -> list[Candidate]:
    """At most `count` different paraphrases: first a turn of phrase alone, then openings, then both. The order of each
    kind is keyed by seed and text."""
    turned = [new for pattern, by in PHRASES if (new := re.sub(pattern, by, text, count=1)) != text]
    turned = _keyed(turned, seed, text)
    openings = QUESTION_OPENINGS if text.rstrip().endswith("?") else REQUEST_OPENINGS
    opened = [opening.replace("{text}", text) for opening in _keyed(openings, seed, text)]
    found = [Candidate(new, "rule:phrase") for new in turned] + [Candidate(new, "rule:opening") for new in opened]
    found += [
        Candidate(opening.replace("{text}", new), "rule:both")
        for new, opening in zip(turned, _keyed(openings, seed, text), strict=False)
    ]
    return list({candidate.text: candidate for candidate in found}.values())[:count]


def _keyed(texts: Sequence[str], seed: int, key: str) -> list[str]:
    return sorted(dict.fromkeys(texts), key=lambda other: derive(seed, "paraphrase", key, other))


class ByModel:
    """Paraphrases of a causal language model.

    Args:
        model: who is asked. sampling: how answers are drawn. seed: of the draws.
    """

    def __init__(self, model: Answers, sampling: SamplingConfig, seed: int) -> None:
        self._model, self._sampling, self._seed = model, sampling, seed

    def __call__(self, texts: Mapping[int, str], count: int) -> dict[int, list[Candidate]]:
        """`count` draws for each text; what loses a fact, asks no more, says nothing or was cut off is left out.

        Args:
            texts: by a number that keys their draws.
        """
        asked = {number: ASK.replace("{text}", text) for number, text in texts.items()}
        replies = self._model.answers(asked, count, self._sampling, seed=self._seed)
        found: dict[int, list[Candidate]] = {}
        for number, text in texts.items():
            cleaned = [cleaned_up(reply.text) for reply in replies.get(number, []) if not reply.truncated]
            kept = [new for new in dict.fromkeys(cleaned) if new and same_facts(text, new) and same_kind(text, new)]
            found[number] = [Candidate(new, "model") for new in kept]
        return found


def cleaned_up(reply: str) -> str:
    """A reply without a label in front and quotation marks around it."""
    text = _LABEL.sub("", reply.strip()).strip()
    while len(text) > 1 and _QUOTES.get(text[0]) == text[-1]:
        text = text[1:-1].strip()
    return text


def same_facts(a: str, b: str) -> bool:
    """Whether two texts hold the same numbers, and the second every quoted text and name of the first."""
    first, second = _FACTS.findall(a), _FACTS.findall(b)
    numbers = [Counter(fact for fact in facts if fact[0].isdigit()) for facts in (first, second)]
    return numbers[0] == numbers[1] and all(fact.strip("\"'“”") in b for fact in first)


def same_kind(asked: str, new: str) -> bool:
    """Whether a rewritten request still seems to ask: one paragraph stays one, and what ends with a question mark, in
    whatever script, does so again. A small model often answers in place of rewriting."""
    paragraphs = [len(re.split(r"\n\s*\n", text.strip())) for text in (asked, new)]
    return paragraphs[1] <= paragraphs[0] and (_asks(new) or not _asks(asked))


def _asks(text: str) -> bool:
    return text.rstrip(" \t\n\"'”»)").endswith(("?", "\uff1f", "\u061f"))  # Latin, Han, Arabic
