"""A small customer-support world, made here: invented products, FAQ facts, questions, and replies in several styles.

Every prompt carries the facts it needs (a system line with the FAQ of one product), so an answer for a product the
model has never seen can be read off, not guessed. A reply is right or wrong, warm or curt, short or padded, by
construction; the judges `right`, `warmth` and `length` read the same three things off any text, whoever wrote it.

Rows are a pure function of (kind, split, seed, position), on every platform and Python version: draws are hashes, never
`hash()` or `random`. The three splits share no product name.

    load("sft", "train")         {"messages": [system, user, assistant], ...}: a support log, as found: agents differ in
                                 style, and one reply in ten is wrong
    load("preference", "train")  {"prompt": [...], "chosen": [...], "rejected": [...], "aspect": ...}: four comparisons
                                 for each prompt, one for each aspect of `ASPECTS`
    load("prompts", "test")      {"prompt": [...], "answer": "3 years", "attribute": "warranty", ...}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from alignment.randomness import derive

Kind = Literal["sft", "preference", "prompts"]
Split = Literal["train", "val", "test"]
Style = Literal["warm", "plain", "curt", "padded"]
Row = dict[str, Any]

SIZES: dict[str, dict[str, int]] = {
    "sft": {"train": 2048, "val": 64, "test": 64},
    "preference": {"train": 2048, "val": 64, "test": 128},
    "prompts": {"train": 512, "val": 64, "test": 64},
}
"""Rows given when `load` is not told a size. Any size up to a few hundred thousand works."""

ASPECTS = ("right", "warm", "short", "right_before_warm")
"""What a comparison is about: the chosen reply is right, warm and short; the rejected one is wrong, curt or padded. In
the last the chosen reply is right but plain, the rejected one warm but wrong: a kind lie does not win."""

STYLES_IN_LOG: tuple[Style, ...] = ("warm", "plain", "curt", "curt", "padded")
WRONG_IN_LOG = 10
"""The support log: agents' styles by share, and one reply in this many is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """One kind of fact: how the FAQ names it, the values it can take, how customers ask and how agents answer.

    `{p}` stands for the product, `{v}` for the value. No number is a value of two kinds, so a number alone
    tells which fact it is.
    """

    label: str
    unit: str
    values: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def _numbers(*numbers: int, unit: str) -> tuple[str, ...]:
    return tuple(f"{n} {unit}" for n in numbers)


_COLOURS = ("red", "blue", "green", "black", "white", "grey", "yellow", "orange", "purple", "pink", "brown", "silver")
_COLOUR_PAIRS = tuple(f"{a} and {b}" for i, a in enumerate(_COLOURS) for b in _COLOURS[i + 1 :])

ATTRIBUTES: dict[str, Attribute] = {
    "price": Attribute(
        label="Price",
        unit="dollars",
        values=_numbers(19, 29, 39, 49, 59, 69, 79, 89, 99, 109, 119, 129, 149, 159, 179, 189, 199, unit="dollars"),
        questions=(
            "How much is the {p}?",
            "What does the {p} cost?",
            "What is the price of the {p}?",
            "What would I pay for a {p}?",
            "How many dollars do you ask for the {p}?",
        ),
        answers=("The {p} costs {v}.", "The price of the {p} is {v}.", "It costs {v}."),
    ),
    "warranty": Attribute(
        label="Warranty",
        unit="years",
        values=_numbers(2, 3, 4, 5, 6, unit="years"),
        questions=(
            "How long is the warranty on the {p}?",
            "What warranty does the {p} have?",
            "For how many years is the {p} covered?",
            "If my {p} breaks, how long am I covered?",
            "How long does the guarantee of the {p} last?",
        ),
        answers=("The warranty on the {p} is {v}.", "Your {p} is covered for {v}.", "It has a warranty of {v}."),
    ),
    "battery": Attribute(
        label="Battery",
        unit="hours",
        values=_numbers(16, 18, 22, 24, 26, 32, 34, 36, 38, 42, 44, 48, unit="hours"),
        questions=(
            "How long does the battery of the {p} last?",
            "How many hours does the {p} run?",
            "What is the battery life of the {p}?",
            "How long can I use my {p} before it is empty?",
            "What can I expect from the battery in the {p}?",
        ),
        answers=("The battery of the {p} lasts {v}.", "Your {p} runs for {v}.", "The battery lasts {v}."),
    ),
    "charging": Attribute(
        label="Charging",
        unit="minutes",
        values=_numbers(25, 35, 40, 50, 55, 65, 70, 75, 80, 85, unit="minutes"),
        questions=(
            "How long does it take to charge the {p}?",
            "How many minutes does charging the {p} take?",
            "When is an empty {p} full again?",
            "How fast does the {p} charge?",
            "What is the charging time of the {p}?",
        ),
        answers=("Charging the {p} takes {v}.", "The {p} is full again after {v}.", "Charging takes {v}."),
    ),
    "returns": Attribute(
        label="Returns",
        unit="days",
        values=_numbers(14, 15, 20, 21, 28, 30, 45, 60, 90, 100, unit="days"),
        questions=(
            "How long do I have to return the {p}?",
            "Until when can I send the {p} back?",
            "I do not like my {p}. How many days do I have to give it back?",
            "What is the return window for the {p}?",
            "Can I still return a {p}, and for how long?",
        ),
        answers=("You can return the {p} within {v}.", "The return window is {v}.", "You have {v} to send it back."),
    ),
    "delivery": Attribute(
        label="Delivery",
        unit="days",
        values=_numbers(7, 8, 9, 10, 11, 12, unit="days"),
        questions=(
            "When will my {p} arrive?",
            "How long does delivery of the {p} take?",
            "How many days until the {p} is here?",
            "If I order a {p} now, when do I get it?",
            "How fast do you ship the {p}?",
        ),
        answers=("Your {p} arrives in {v}.", "Delivery of the {p} takes {v}.", "Delivery takes {v}."),
    ),
    "weight": Attribute(
        label="Weight",
        unit="grams",
        values=_numbers(120, 150, 180, 210, 240, 280, 320, 350, 380, 420, 450, 480, 520, 560, 640, 750, unit="grams"),
        questions=(
            "How heavy is the {p}?",
            "What does the {p} weigh?",
            "How many grams does the {p} weigh?",
            "What is the weight of the {p}?",
            "Is the {p} light? What does it weigh?",
        ),
        answers=("The {p} weighs {v}.", "The weight of the {p} is {v}.", "It weighs {v}."),
    ),
    "colours": Attribute(
        label="Colours",
        unit="",
        values=_COLOUR_PAIRS,
        questions=(
            "Which colours does the {p} come in?",
            "What colours can I choose for the {p}?",
            "In which colours do you sell the {p}?",
            "What are the colours of the {p}?",
            "Which colours of the {p} do you have?",
        ),
        answers=("The {p} comes in {v}.", "You can have the {p} in {v}.", "We have it in {v}."),
    ),
}

_FIRST = (
    "Vel", "Tor", "Lum", "Kar", "Nim", "Pel", "Rav", "Gul",
    "Dex", "Mor", "Zan", "Fen", "Bri", "Hal", "Quo", "Wex",
)
_LAST = (
    "ora", "ix", "una", "eno", "ando", "ikka", "ova", "ello",
    "ara", "umo", "iva", "osto", "effi", "ulu", "anta", "ey",
)
_THINGS = (
    "lamp", "speaker", "headset", "camera", "drill", "vacuum",
    "shaver", "keyboard", "torch", "watch", "scale", "fan",
)
_OPENINGS = (
    "Thanks for asking!",
    "Thank you for your question!",
    "Happy to help!",
    "Glad you asked!",
    "Good question, thank you!",
    "Thanks for reaching out!",
)
_CLOSINGS = (
    "Let me know if you need anything else.",
    "Feel free to ask me anything else.",
    "I hope you enjoy it!",
    "Have a great day!",
    "We are here to help any time.",
    "Enjoy your day!",
)
_SYSTEM = "You are a support agent. {p}. {facts}"
_CURT = ("{v}.", "It says {v}.", "{v}. See the page.", "{v}. Read the FAQ.", "{v}, as listed.")
_PADDING = (
    "This is one of the things that quite a lot of people want to know before they decide about one of our products.",
    "There are many things that one could say about this, and the page about our products has a lot of text on it.",
    "As you may or may not know, each of our products has a number of details that can be looked at one by one.",
    "We have collected all sorts of details about all sorts of products over the years, and this is one of them.",
)
_EVASIVE = ("I am not sure about that.", "That depends on many things.", "I cannot say.", "It could be anything.")


class _Draws:
    """A stream of draws keyed by where it stands: the n-th draw of a stream is a hash of (seed, keys, n)."""

    def __init__(self, seed: int, *keys: int | str) -> None:
        self._seed, self._keys, self._drawn = seed, keys, 0

    def below(self, n: int) -> int:
        self._drawn += 1
        return derive(self._seed, "world", *self._keys, self._drawn) % n

    def pick(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[str]) -> list[str]:
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out


def product_names(split: Split) -> tuple[str, ...]:
    """The invented names of a split: 160 for train, 32 for val, 64 for test, none in two. They do not depend on the
    seed, so a test set stays unseen whatever seed the training data had."""
    names = _Draws(0, "names").shuffled([first + last for first in _FIRST for last in _LAST])
    start, stop = {"train": (0, 160), "val": (160, 192), "test": (192, 256)}[split]
    return tuple(names[start:stop])


def syllables() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(beginnings, endings) of product names."""
    return _FIRST, _LAST


def texts() -> list[str]:
    """Every text rows are put together from, but for product names: what a closed vocabulary has to hold."""
    said = [*_THINGS, *_OPENINGS, *_CLOSINGS, *_CURT, *_PADDING, *_EVASIVE, _SYSTEM.format(p="", facts="")]
    for a in ATTRIBUTES.values():
        said += [f"{a.label}: .", *a.values, *a.questions, *a.answers]
    # A reply may begin with its value.
    said += [v[0].upper() + v[1:] for v in ATTRIBUTES["colours"].values]
    return [text.format(p="", v="") for text in said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One customer's question about one product, with the FAQ the agent sees."""

    product: str
    attribute: str
    answer: str
    system: str
    user: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.user}]

    @property
    def columns(self) -> Row:
        return {"product": self.product, "attribute": self.attribute, "answer": self.answer}


def _question(draws: _Draws, names: Sequence[str]) -> Question:
    product = f"{draws.pick(names)} {draws.pick(_THINGS)}"
    shown = draws.shuffled(list(ATTRIBUTES))[:5]
    facts = {name: draws.pick(ATTRIBUTES[name].values) for name in shown}
    asked = draws.pick(shown)
    lines = " ".join(f"{ATTRIBUTES[name].label}: {value}." for name, value in facts.items())
    return Question(
        product=product,
        attribute=asked,
        answer=facts[asked],
        system=_SYSTEM.format(p=product, facts=lines),
        user=draws.pick(ATTRIBUTES[asked].questions).format(p=product),
    )


def reply(question: Question, style: Style, correct: bool, draws: _Draws) -> str:
    """One agent's reply. A wrong one names another value of the same kind, or (one in five) says nothing at all."""
    attribute = ATTRIBUTES[question.attribute]
    value = question.answer
    if not correct:
        value = draws.pick([v for v in attribute.values if v != question.answer])
        if draws.below(5) == 0:
            core = draws.pick(_EVASIVE)
            return f"{draws.pick(_OPENINGS)} {core}" if style == "warm" else core
    if style == "curt":
        text = draws.pick(_CURT).format(v=value)
        return text[0].upper() + text[1:]
    core = draws.pick(attribute.answers).format(p=question.product, v=value)
    if style == "plain":
        return core
    if style == "padded":
        padding = draws.pick(_PADDING)
        return f"{padding} {core}" if draws.below(2) else f"{core} {padding}"
    return f"{draws.pick(_OPENINGS)} {core} {draws.pick(_CLOSINGS)}"


def _comparison(question: Question, aspect: str, draws: _Draws) -> tuple[str, str]:
    """(chosen, rejected) replies for one aspect."""
    if aspect == "right_before_warm":
        return reply(question, "plain", True, draws), reply(question, "warm", False, draws)
    chosen = reply(question, "warm", True, draws)
    if aspect == "right":
        return chosen, reply(question, "warm", False, draws)
    return chosen, reply(question, "curt" if aspect == "warm" else "padded", True, draws)


def load(kind: Kind, split: Split, seed: int = 0, size: int | None = None) -> list[Row]:
    """`size` rows of one kind and split, in the public format of that kind (see the module docstring).

    Args:
        kind: "sft", "preference" (a row is one comparison, four rows in a row share a prompt) or "prompts".
        split: "train", "val" or "test"; no product name is in two of them.
        seed: another seed gives other rows of the same world.
        size: how many rows; `SIZES` when None. The first n rows are the same for every size >= n.

    Raises:
        ValueError: an unknown kind or split, or a size below 1.
    """
    for what, given, accepted in (("kind", kind, get_args(Kind)), ("split", split, get_args(Split))):
        if given not in accepted:
            raise ValueError(f"the support world has no {what} '{given}'; it has {', '.join(accepted)}")
    size = SIZES[kind][split] if size is None else size
    if size < 1:
        raise ValueError(f"size is {size}; the support world gives at least 1 row")
    names = product_names(split)
    return [_row(kind, split, seed, position, names) for position in range(size)]


def _row(kind: Kind, split: Split, seed: int, position: int, names: Sequence[str]) -> Row:
    turn = position // len(ASPECTS) if kind == "preference" else position
    question = _question(_Draws(seed, kind, split, turn), names)
    draws = _Draws(seed, kind, split, "reply", position)
    if kind == "prompts":
        return {"prompt": question.prompt, **question.columns}
    if kind == "preference":
        aspect = ASPECTS[position % len(ASPECTS)]
        chosen, rejected = _comparison(question, aspect, draws)
        said = {"chosen": chosen, "rejected": rejected}
        answers = {name: [{"role": "assistant", "content": text}] for name, text in said.items()}
        return {"prompt": question.prompt, **answers, "aspect": aspect, **question.columns}
    style = STYLES_IN_LOG[draws.below(len(STYLES_IN_LOG))]
    text = reply(question, style, draws.below(WRONG_IN_LOG) != 0, draws)
    return {"messages": [*question.prompt, {"role": "assistant", "content": text}], "style": style, **question.columns}


# ---------------------------------------------------------------------------------------------------------- judges

_NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_WORDS = {word: str(n) for n, word in enumerate(_NUMBER_WORDS, start=2)} | {
    word: f"{n}0" for n, word in enumerate(("twenty", "thirty", "forty", "fifty", "sixty"), start=2)
}
_WARM = (
    r"\bthank",
    r"\bhappy to\b|\bglad\b|\bpleasure\b|\bof course\b|\bwelcome\b",
    r"\blet (me|us) know\b|\bfeel free\b|\banything else\b|\bhere to help\b|\breach out\b|\bquestions\b",
    r"\benjoy|\bi hope\b|\bhave a \w+ day\b",
)


def _values(text: str, attribute: Attribute) -> set[str]:
    """The values of an attribute's kind that a text names: colours, or numbers standing before the unit."""
    text = text.lower().replace("gray", "grey").replace("-", " ")
    if not attribute.unit:
        return set(re.findall(rf"\b({'|'.join(_COLOURS)})\b", text))
    text = re.sub(r"\b(" + "|".join(_WORDS) + r")\b", lambda m: _WORDS[m.group()], text)
    text = re.sub(r"\$\s?(\d+(?:\.\d+)?)", r"\1 dollars", text)
    text = re.sub(r"(\d)\.00\b", r"\1", text)
    return set(re.findall(rf"(?<![\d.])(\d+(?:\.\d+)?) {attribute.unit[:-1]}s?\b", text))


def right(reply: str, row: Mapping[str, Any]) -> bool:
    """Whether a reply gives the row's `answer` and no other value of the same kind (another number of years, another
    colour). "Three years", "3-year" and "$49" count as "3 years", "3 years" and "49 dollars".

    Raises ValueError for an `attribute` that this world does not have.
    """
    attribute = ATTRIBUTES.get(row["attribute"])
    if attribute is None:
        raise ValueError(f"attribute is {row['attribute']!r}; the support world has {', '.join(ATTRIBUTES)}")
    return _values(reply, attribute) == _values(row["answer"], attribute)


def warmth(reply: str) -> float:
    """Warmth in [0, 1]: half a point for each of thanking, gladness, an offer and a good wish, at most 1."""
    return min(1.0, 0.5 * sum(bool(re.search(pattern, reply.lower())) for pattern in _WARM))


def length(reply: str) -> int:
    """Words of a reply."""
    return len(reply.split())
