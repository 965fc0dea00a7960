"""Which errors the rejected completions show: a policy unlearns those that it sees.

From a column, from a classifier, or else from signs that need no model: each compares the rejected completion with the
prompt and, in pairs, with the chosen one. Signs are hints: a name that stands nowhere else may be right, and a claim
made of known words may be false.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alignment.quality.classify import classify
from alignment.quality.findings import Faults, Finding, percent, share
from alignment.quality.patterns import toxic
from alignment.quality.reading import Corpus, Example, normal
from alignment.quality.settings import Settings

_SURE = 0.5
"""Least probability of a classifier's label."""
_LEAST_SHARE = 0.01
"""Share of the negatives from which on a kind of error is covered."""
_NO_ERROR = {"", "none", "ok", "good", "correct", "neutral", "no", "no_error", "other"}
_ALIASES = {
    "hallucination": "hallucinated",
    "hallucinations": "hallucinated",
    "hallucinating": "hallucinated",
    "gibberish": "meaningless",
    "nonsense": "meaningless",
    "toxic": "unsafe",
    "harmful": "unsafe",
    "offtopic": "off_topic",
    "irrelevant": "off_topic",
    "incomplete": "truncated",
}
_REFUSES = re.compile(
    r"^\W*(?:i(?:'m| am) (?:very |so )?sorry|sorry,|i (?:cannot|can't|can not|won't|am unable)|as an ai\b)", re.I
)
_ENDS = re.compile(r"""[.!?…。！？:;)\]}>"'”’»`*|]\s*\Z""")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}")
_WORD = re.compile(r"\w+")
_COMMON = frozenset(
    _WORD.findall(
        "about after again also been before being could does doing down each even every from further have having "
        "here into just like make many more most much must need only other over please same should some such than "
        "that their them then there these they this those through under very want were what when where which while "
        "will with would write your answer explain describe give list provide question sentence following"
    )
)


@dataclass(frozen=True, slots=True)
class Negative:
    """A completion to avoid, its prompt, and the completion it lost to ("" where there is none)."""

    prompt: str
    text: str
    chosen: str


def _repetition(text: str) -> float:
    """Share of the runs of four words that stood before, 0 for fewer than 20 words."""
    words = normal(text).split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(runs)) / len(runs) if len(words) >= 20 else 0.0


def _letters(text: str) -> float:
    """Share of letters and digits among the characters that are not space."""
    signs = [c for c in text if not c.isspace()]
    return sum(c.isalnum() for c in signs) / len(signs) if signs else 0.0


def _meaningless(n: Negative) -> bool:
    if _repetition(n.text) > 0.5 and _repetition(n.chosen) <= 0.5:
        return True
    return _letters(n.text) < 0.4 and (not n.chosen or _letters(n.chosen) >= 0.4)


def _truncated(n: Negative) -> bool:
    if n.text.count("```") % 2 and n.chosen.count("```") % 2 == 0:
        return True
    # Replies in the style of lists and labels end without a sign too: the chosen one tells what is usual here.
    return len(n.text.split()) >= 8 and not _ENDS.search(n.text) and bool(_ENDS.search(n.chosen))


def _unsafe(n: Negative) -> bool:
    return bool(set(toxic(n.text)) - set(toxic(n.chosen)))


def _content(text: str) -> set[str]:
    return {word[:6] for word in _WORD.findall(text.casefold()) if len(word) > 3 and word not in _COMMON}


def _off_topic(n: Negative) -> bool:
    asked, said = _content(n.prompt), _content(n.text)
    return len(asked) >= 2 and len(said) >= 3 and not asked & said and bool(asked & _content(n.chosen))


def _hallucinated(n: Negative) -> bool:
    known = f"{n.prompt} {n.chosen}"
    numbers = set(_NUMBER.findall(n.text)) - set(_NUMBER.findall(known))
    names = {name.casefold() for name in _NAME.findall(n.text)} - set(_WORD.findall(known.casefold()))
    return bool(n.chosen) and bool(numbers or names)


def _refuses(n: Negative) -> bool:
    return bool(_REFUSES.search(n.text)) and not _REFUSES.search(n.chosen)


SIGNS: Mapping[str, Callable[[Negative], bool]] = {
    "hallucinated": _hallucinated,
    "meaningless": _meaningless,
    "unsafe": _unsafe,
    "off_topic": _off_topic,
    "truncated": _truncated,
    "refusal": _refuses,
}
"""Kind of error -> whether a negative shows its sign: a number or name that neither prompt nor chosen reply holds;
words that repeat themselves, or hardly any letters; a phrase of `patterns.TOXIC`; no word of the prompt where the
chosen reply has some; an end in the middle of a sentence or of a code block; an apology for not answering."""


def negatives(corpus: Corpus, settings: Settings) -> Finding:
    """Value: how many of the wanted kinds of error fewer than 1 % of the rejected completions show."""
    limit = settings.limit("negatives")
    rows = [e for e in corpus.examples if e.negatives]
    if not rows:
        return Finding(check="negatives", limit=limit, measured="not measurable: no completions to avoid")
    by, kinds = _kinds(rows, settings)
    counts = Counter(kind for found in kinds for kind in found)
    none = sum(not found for found in kinds)
    wanted = [_kind(name) for name in settings.error_types]
    missing = [name for name in wanted if counts[name] < _LEAST_SHARE * len(rows) or not counts[name]]
    faults = {kind: Faults(what=kind, show=settings.show) for kind, _ in counts.most_common()}
    for example, found in zip(rows, kinds, strict=True):
        for kind in found:
            faults[kind].add(example.place)
    shares = ", ".join(f"{kind} {percent(share(count, len(rows)))}" for kind, count in counts.most_common())
    return Finding(
        check="negatives",
        limit=limit,
        value=float(len(missing)),
        measured=f"of {len(rows):,} negatives by {by}: {shares or 'no kind of error'}; none "
        f"{percent(share(none, len(rows)))}" + (f"; missing: {', '.join(missing)}" if missing else ""),
        advice=f"add negatives that are {', '.join(missing)}; name kinds in a column {settings.error_column}",
        figures={
            "by": by,
            "negatives": len(rows),
            "kinds": dict(counts),
            "unmarked": none,
            "wanted": wanted,
            "missing": missing,
        },
        histogram=dict(counts.most_common()),
        faults=list(faults.values()),
    )


def _kinds(rows: Sequence[Example], settings: Settings) -> tuple[str, list[list[str]]]:
    """(where they are from, the kinds of error of each row)."""
    column = settings.error_column
    if any(column in example.columns for example in rows):
        return f"column {column}", [_named(example.columns.get(column)) for example in rows]
    texts = [(e, text) for e in rows for text in e.negatives]
    if settings.error_classifier is not None:
        scores = classify(settings.error_classifier, [text for _, text in texts])
        of_text = [[_kind(label) for label, p in labels.items() if p >= _SURE] for labels in scores]
        by = f"classifier {settings.error_classifier}"
    else:
        shown = [Negative(e.prompt, text, e.pair[0] if e.pair else "") for e, text in texts]
        of_text = [[kind for kind, sign in SIGNS.items() if sign(negative)] for negative in shown]
        by = "signs"
    found: dict[str, list[str]] = {example.place: [] for example in rows}
    for (example, _), kinds in zip(texts, of_text, strict=True):
        found[example.place] += [kind for kind in kinds if kind not in _NO_ERROR]
    return by, [list(dict.fromkeys(found[example.place])) for example in rows]


def _kind(name: str) -> str:
    word = re.sub(r"[^a-z0-9]+", "_", normal(name)).strip("_")
    return _ALIASES.get(word, word)


def _named(value: object) -> list[str]:
    """A cell: a word, words separated by commas, or a list of them."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            value = str(value).strip().strip("[]")
    parts = value if isinstance(value, list | tuple) else str("" if value is None else value).split(",")
    return [kind for kind in dict.fromkeys(_kind(str(part)) for part in parts) if kind not in _NO_ERROR]
