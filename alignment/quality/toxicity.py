"""Toxic texts, by what a policy does with them, and adversarial prompts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from alignment.errors import UserError
from alignment.quality.classify import classify
from alignment.quality.findings import Faults, Finding, percent, share
from alignment.quality.patterns import adversarial as attacks
from alignment.quality.patterns import control_tokens, toxic
from alignment.quality.reading import Corpus, normal
from alignment.quality.settings import Settings

_TOXIC = "tox|hate|obscen|threat|insult|offens|abus|unsafe|harm(?!less)"
_ADVERSARIAL = "inject|jailbreak|advers|attack|malicious"
"""Parts of the names of labels."""
_SURE = 0.5
"""Least probability of a label."""
_UNMARKED = {"", "none", "false", "no", "0"}
_IMITATED, _AVOIDED = "completion to imitate", "completion to avoid"


def toxicity(corpus: Corpus, settings: Settings) -> Finding:
    """Toxic texts in prompts, in completions to imitate and in completions to avoid.

    Value: share of the rows whose completion to imitate is toxic. Toxic negatives are wanted: they show what not to do.
    """
    texts = [
        (part, example.place, text)
        for example in corpus.examples
        for part, group in (("prompt", (example.prompt,)), (_IMITATED, example.learned), (_AVOIDED, example.negatives))
        for text in group
        if text
    ]
    kinds: Counter[str] = Counter()
    faults = {part: Faults(what=f"toxic {part}", show=settings.show) for part in ("prompt", _IMITATED, _AVOIDED)}
    for (part, place, _), found in zip(texts, _kinds([text for _, _, text in texts], settings), strict=True):
        if found:
            kinds.update(found)
            faults[part].add(f"{place}: {', '.join(found)}")
    count, imitated = len(corpus.examples), faults[_IMITATED].count
    by = f"classifier {settings.toxicity_classifier}" if settings.toxicity_classifier else "English phrases"
    return Finding(
        check="toxicity",
        limit=settings.limit("toxicity"),
        value=share(imitated, count),
        measured=f"{imitated:,} of {count:,} rows teach toxic text ({by}); {faults['prompt'].count:,} toxic prompts, "
        f"{faults[_AVOIDED].count:,} toxic negatives",
        advice="read and drop them; toxic prompts and negatives may stay where the chosen reply is good",
        figures={
            "by": by,
            "rows": count,
            "imitated": imitated,
            "prompts": faults["prompt"].count,
            "negatives": faults[_AVOIDED].count,
            "kinds": dict(kinds),
        },
        histogram=dict(kinds.most_common()),
        faults=list(faults.values()),
    )


def _kinds(texts: Sequence[str], settings: Settings) -> list[list[str]]:
    """What is toxic about each text."""
    name = settings.toxicity_classifier
    if name is None or not texts:
        return [toxic(text) for text in texts]
    return _labels(name, texts, settings.toxic_labels, _TOXIC, "toxic")


def _labels(name: str, texts: Sequence[str], wanted: Sequence[str], known: str, kind: str) -> list[list[str]]:
    """The labels of a classifier that hold of each text: those that are `wanted`, else those whose names say so."""
    scores = classify(name, texts)
    labels = list(scores[0])
    opposite = rf"^(?:non?|not|un|in|neutral)[-_ ]?(?:{known})"
    told = [n for n in labels if re.search(known, n, re.IGNORECASE) and not re.search(opposite, n, re.IGNORECASE)]
    chosen = list(wanted) or told
    unknown = [label for label in chosen if label not in labels]
    if unknown or not chosen:
        what = f"has no label '{unknown[0]}'" if unknown else f"has no label whose name says {kind}"
        raise UserError(f"'{name}' {what}; name them with --{kind}_labels, of {', '.join(labels)}")
    return [[label for label in chosen if found[label] >= _SURE] for found in scores]


def adversarial(corpus: Corpus, settings: Settings) -> Finding:
    """Prompts that attack a model's instructions: marked in a column; else told by a classifier, or by patterns.

    Value: their share of the rows. Some are wanted (`alignment data augment` adds 5 %), many are an attack.
    """
    by, found_in = _attacks(corpus, settings)
    kinds: Counter[str] = Counter()
    fault = Faults(what="adversarial prompt", show=settings.show)
    spelled = Faults(what="control tokens spelled out in a completion", show=settings.show)
    for example, found in zip(corpus.examples, found_in, strict=True):
        if found:
            kinds.update(found)
            fault.add(f"{example.place}: {', '.join(found)}")
        if any(map(control_tokens, example.completions)):
            spelled.add(example.place)
    rows = len(corpus.examples)
    value = share(fault.count, rows)
    hint = "" if fault.count else "; none at all: alignment data augment adds 5 %"
    return Finding(
        check="adversarial",
        limit=settings.limit("adversarial"),
        value=value,
        measured=f"{fault.count:,} of {rows:,} prompts ({percent(value)}) by {by}{hint}",
        advice="find out where they come from; 5 % is enough to learn from",
        figures={"by": by, "rows": rows, "adversarial": fault.count, "control_tokens": spelled.count},
        histogram=dict(kinds.most_common()),
        faults=[fault, spelled],
    )


def _attacks(corpus: Corpus, settings: Settings) -> tuple[str, list[list[str]]]:
    """(where they are from, the kinds of attack of each row)."""
    column, name = settings.adversarial_column, settings.adversarial_classifier
    if any(column in example.columns for example in corpus.examples):
        return f"column {column}", [_marks(example.columns.get(column)) for example in corpus.examples]
    if name is not None:
        texts = [example.prompt for example in corpus.examples]
        return f"classifier {name}", _labels(name, texts, settings.adversarial_labels, _ADVERSARIAL, "adversarial")
    return "patterns", [attacks(example.prompt) for example in corpus.examples]


def _marks(value: object) -> list[str]:
    text = normal(str(value)) if value is not None else ""
    if text in _UNMARKED:
        return []
    return ["marked"] if text in ("true", "1", "yes") else [text]
