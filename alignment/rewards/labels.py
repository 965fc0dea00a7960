"""What rewards ask of a text classifier of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alignment.errors import UserError

if TYPE_CHECKING:
    from alignment.rewards.model import Classifier


def optional_classifier(name: str | None, max_tokens: int | None, device: str | None) -> Classifier | None:
    """The classifier of that name, None for none. Raises UserError for settings that only a classifier has."""
    if name is None:
        if device is not None or max_tokens is not None:
            raise UserError("device and max_tokens are for a classifier; name one, or leave them out")
        return None
    from alignment.rewards.model import Classifier  # brings torch, which a worker with word lists does without

    return Classifier(name, "completion", max_tokens, device=device)


def output_of(classifier: Classifier, label: str | int) -> int:
    """The output of a label. Raises UserError for a model without such labels."""
    column = classifier.column(label)
    if column is None:
        raise UserError(f"'{classifier.name}' has no labels to choose from; a classifier with at least two is needed")
    return column


def probabilities(classifier: Classifier, texts: Sequence[str]) -> list[list[float] | None]:
    """Per text the probabilities of its labels, None for a blank one."""
    kept = [i for i, text in enumerate(texts) if text.strip()]
    rows: list[list[float] | None] = [None] * len(texts)
    if kept:
        found = classifier.probabilities([texts[i] for i in kept]).tolist()
        for i, row in zip(kept, found, strict=True):
            rows[i] = row
    return rows
