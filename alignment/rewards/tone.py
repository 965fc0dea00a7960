"""The tone of a reply: sentiment and toxicity, by any text classifier of transformers, or by word lists, offline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from alignment.errors import UserError
from alignment.rewards.extra import needed
from alignment.rewards.labels import optional_classifier, output_of, probabilities

_DISGUISES = {
    **{"a": "a@*4", "e": "e*3", "i": "i*l1", "o": "o*0@", "u": "u*v"},
    **{"l": "l1", "s": "s$5", "t": "t7", "v": "v*u"},
}
"""What stands for a letter, as better-profanity has it."""


class Sentiment:
    """Polarity of a reply, from 0 (negative) over 1/2 (neutral) to 1 (positive). Abstains on a blank reply.

    With a classifier: (1 + P(positive) - P(negative)) / 2, the sentiment score of FinBERT (Araci 2019, arXiv
    1908.10063) moved to [0, 1]. Without one: (1 + compound) / 2 of VADER (Hutto and Gilbert 2014), a lexicon for
    English that needs no model and no network (extra `rewards`).

    Args:
        name: folder or hub id of a sequence classifier with safetensors weights, such as `ProsusAI/finbert`. Null:
            VADER.
        positive, negative: its labels, by name (in any case) or number.
        max_tokens: longer replies lose their beginning. Null: what the model can read.
        device: null: the current GPU if there is one (workers see none), else the CPU.
    """

    def __init__(
        self,
        name: str | None = None,
        positive: str | int = "positive",
        negative: str | int = "negative",
        max_tokens: int | None = None,
        device: str | None = None,
    ) -> None:
        self._classifier = optional_classifier(name, max_tokens, device)
        if self._classifier is None:
            analyzer = needed("vaderSentiment.vaderSentiment", "vaderSentiment").SentimentIntensityAnalyzer()
            self._scores = analyzer.polarity_scores
        else:
            self._positive = output_of(self._classifier, positive)
            self._negative = output_of(self._classifier, negative)

    def __call__(self, completions: list[str]) -> list[float | None]:
        if self._classifier is None:
            return [(1 + float(self._scores(c)["compound"])) / 2 if c.strip() else None for c in completions]
        rows = probabilities(self._classifier, completions)
        return [None if row is None else (1 + row[self._positive] - row[self._negative]) / 2 for row in rows]


class Toxicity:
    """How free of toxicity a reply is: 1 for none, towards 0 for much. Abstains on a blank reply.

    With a classifier: 1 - P(label), of several labels the likeliest. Without one: 1 / (1 + n) for n listed words,
    disguised ones (`@` for a, `3` for e, ...) included; a list knows neither context nor threats in plain words.

    Args:
        name: folder or hub id of a sequence classifier with safetensors weights, such as `unitary/toxic-bert`, whose
            labels a text may have together, or `s-nlp/roberta_toxicity_classifier`, whose labels exclude each other.
            Null: the word list.
        label: the toxic label or labels of the classifier, by name (in any case) or number.
        words: the word list: a text file with a word or phrase a line, or the words themselves. Null: that of
            better-profanity (extra `rewards`), English.
        max_tokens: longer replies lose their beginning. Null: what the model can read.
        device: null: the current GPU if there is one (workers see none), else the CPU.
    """

    def __init__(
        self,
        name: str | None = None,
        label: str | int | Sequence[str | int] = "toxic",
        words: str | Sequence[str] | None = None,
        max_tokens: int | None = None,
        device: str | None = None,
    ) -> None:
        self._classifier = optional_classifier(name, max_tokens, device)
        if self._classifier is None:
            self._listed = _pattern(_words(words))
            return
        if words is not None:
            raise UserError("a classifier is named, so words are not read; leave one of the two out")
        labels = [label] if isinstance(label, str | int) else list(label)
        if not labels:
            raise UserError("label is empty; name at least one toxic label")
        self._columns = [output_of(self._classifier, each) for each in labels]

    def __call__(self, completions: list[str]) -> list[float | None]:
        if self._classifier is None:
            return [1 / (1 + self._count(c)) if c.strip() else None for c in completions]
        rows = probabilities(self._classifier, completions)
        return [None if row is None else 1 - max(row[column] for column in self._columns) for row in rows]

    def _count(self, text: str) -> int:
        """Listed words in a text. What has no letter is no disguise: 455 is a number."""
        return sum(any(map(str.isalpha, found)) for found in self._listed.findall(text.casefold()))


# -------------------------------------------------------------------------------------------------------- word list


def _words(given: str | Sequence[str] | None) -> list[str]:
    """The words of a list, of a file, or of better-profanity."""
    if given is None:
        needed("better_profanity", "better-profanity")
        lines = files("better_profanity").joinpath("profanity_wordlist.txt").read_text(encoding="utf-8").splitlines()
    elif isinstance(given, str):
        try:
            lines = Path(given).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"words '{given}' cannot be read as text: {error}") from error
    else:
        lines = [str(word) for word in given]
    words = [line.strip().casefold() for line in lines if re.search(r"\w", line)]
    if not words:
        raise UserError("words holds no word; it is a text file with a word or phrase a line, or a list of them")
    return words


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the words, whole, in casefolded text. The longest is tried first."""
    ordered = sorted(set(words), key=lambda word: (-len(word), word))
    return re.compile(r"(?<!\w)(?:" + "|".join(map(_disguised, ordered)) + r")(?!\w)")


def _disguised(word: str) -> str:
    """A word, each letter also as what commonly stands for it; between the words of a phrase whatever is no word."""
    parts = []
    for char in re.sub(r"\s+", " ", word):
        if char == " ":
            parts.append(r"[\W_]+")
        elif char in _DISGUISES:
            parts.append("[" + re.escape(_DISGUISES[char]) + "]")
        else:
            parts.append(re.escape(char))
    return "".join(parts)
