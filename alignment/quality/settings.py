"""What a check of rows looks at, and from where on it complains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from alignment.cli_errors import suggest
from alignment.errors import UserError

if TYPE_CHECKING:
    from alignment.chat import Template  # with it comes transformers, and `--help` does without

Verdict = Literal["ok", "warn", "fail", "n/a"]
Kind = Literal["auto", "preference", "unpaired", "supervised", "prompts"]
Level = Literal["auto", "nominal", "ordinal", "interval"]


@dataclass(frozen=True, slots=True)
class Limit:
    """Values beyond `warn` are worth a look, beyond `fail` (None: never) they are a finding. Beyond is above, or with
    `below` the same and lower."""

    warn: float
    fail: float | None = None
    below: bool = False

    def verdict(self, value: float | None) -> Verdict:
        """What a value amounts to; None cannot be measured."""
        if value is None:
            return "n/a"
        if self.fail is not None and self._beyond(value, self.fail):
            return "fail"
        return "warn" if self._beyond(value, self.warn) else "ok"

    def _beyond(self, value: float, limit: float) -> bool:
        return value <= limit if self.below else value > limit

    def __str__(self) -> str:
        sign = "≤" if self.below else ">"
        fails = "" if self.fail is None else f"fail {sign} {self.fail:g}"
        warns = f"warn {sign} {self.warn:g}" if self.fail != self.warn else ""
        return ", ".join(part for part in (warns, fails) if part)


LIMITS: Mapping[str, Limit] = {
    "rows": Limit(0.0, 0.05),
    "comparisons": Limit(0.1),
    # Krippendorff (Content Analysis, 2004, p. 241): below 0.667 no conclusion, not even a tentative one.
    "agreement": Limit(0.7, 0.667, below=True),
    "negatives": Limit(0.0),
    "duplicates": Limit(0.0, 0.05),
    "near_duplicates": Limit(0.05, 0.2),
    "leakage": Limit(0.0, 0.01),
    "length_bias": Limit(0.6, 0.7),
    "contradictions": Limit(0.0, 0.02),
    "label_noise": Limit(0.1),
    "tokens": Limit(0.01, 0.05),
    "toxicity": Limit(0.0, 0.01),
    "adversarial": Limit(0.1, 0.3),
}
"""check -> the limit of its value, in the order of the report. What the values are is in docs/data_quality.md."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every option of `alignment data check`.

    Args:
        kind: what rows are for; `auto` takes the first that their columns suffice for.
        columns: our names for the source's columns.
        splits: which splits to read of a hub dataset, a saved one or the built-in world.
        config: configuration of a hub dataset.
        split_column: column that says which split a row is in; without it a file is a split.
        annotator_column: who judged a row, where rows repeat a pair.
        votes_column: votes of several annotators on a row: a list, or a mapping from annotator to vote.
        error_column: what is wrong with the rejected completion: a word or a list of words.
        adversarial_column: which attack a row holds, as `alignment data augment` writes it ("none": no attack).
        level: scale of the votes; `auto`: ordinal for more than two different numbers, else nominal.
        comparisons: wanted for each prompt.
        error_types: kinds of errors that negatives should show.
        error_classifier: a transformers sequence classifier whose labels are kinds of errors.
        toxicity_classifier: a transformers sequence classifier that tells toxic texts.
        toxic_labels: which of its labels are toxic; none: those whose names say so.
        adversarial_classifier: a transformers sequence classifier that tells attacks on a model's instructions.
        adversarial_labels: which of its labels are attacks; none: those whose names say so.
        tokenizer: whose tokens are counted.
        template: chat template, as in the data modules.
        max_prompt_tokens, max_completion_tokens, max_tokens: limits in tokens, as in the data modules.
        similarity: Jaccard similarity of shingles from which on texts are near-duplicates.
        shingle: words in a shingle.
        max_rows: rows read of each file.
        show: rows named for each fault; counts are exact.
        skip: checks to leave out.
        limits: another limit than that of `LIMITS`.
    """

    kind: Kind = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    splits: Sequence[str] = ("train",)
    config: str | None = None
    split_column: str = "split"
    annotator_column: str = "annotator"
    votes_column: str = "votes"
    error_column: str = "error_type"
    adversarial_column: str = "attack"
    level: Level = "auto"
    comparisons: int = 3
    error_types: Sequence[str] = ("hallucinated", "meaningless", "unsafe")
    error_classifier: str | None = None
    toxicity_classifier: str | None = None
    toxic_labels: Sequence[str] = ()
    adversarial_classifier: str | None = None
    adversarial_labels: Sequence[str] = ()
    tokenizer: str | None = None
    template: Template = "auto"
    max_prompt_tokens: int | None = 1024
    max_completion_tokens: int | None = 1024
    max_tokens: int | None = None
    similarity: float = 0.8
    shingle: int = 3
    max_rows: int | None = None
    show: int = 20
    skip: Sequence[str] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 < self.similarity <= 1.0:
            raise UserError(f"--similarity is a share above 0 and at most 1, got {self.similarity:g}")
        for name in (
            *("comparisons", "shingle", "max_rows"),
            *("max_prompt_tokens", "max_completion_tokens", "max_tokens"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} must be at least 1, got {value}")
        if self.show < 0:
            raise UserError(f"--show must not be negative, got {self.show}")
        for name in self.skip:
            known_check(name, "--skip")
        if not self.splits:
            raise UserError("--splits names no split; give for example train,test")

    @property
    def named_columns(self) -> tuple[str, ...]:
        """The columns that checks look up."""
        return (
            *(self.split_column, self.annotator_column, self.votes_column),
            *(self.error_column, self.adversarial_column),
        )

    def limit(self, check: str) -> Limit:
        """The limit in force."""
        return self.limits.get(check, LIMITS[check])


def known_check(name: str, flag: str) -> str:
    """`name`, if there is such a check. Raises UserError."""
    if name not in LIMITS:
        meant = suggest(name, LIMITS)
        raise UserError(
            f"{flag}: no check '{name}'; " + (f"did you mean '{meant}'?" if meant else f"there are {', '.join(LIMITS)}")
        )
    return name


def limits_of(given: Sequence[str]) -> dict[str, Limit]:
    """From texts such as `near_duplicates=0.02,0.1` (warn, fail), `agreement=0.8` (fail there, no warning before) or
    `comparisons=0.1,none` (warn only). Raises UserError."""
    out = {}
    for text in given:
        name, equals, values = text.partition("=")
        parts = values.split(",")
        try:
            numbers = [None if part.strip().lower() == "none" else float(part) for part in parts]
        except ValueError:
            numbers = []
        warn = numbers[0] if len(numbers) in (1, 2) else None
        if not equals or warn is None or not all(n is None or math.isfinite(n) for n in numbers):
            raise UserError(f"--limit is '{text}'; give NAME=WARN,FAIL, for example near_duplicates=0.02,0.1")
        below = LIMITS[known_check(name, "--limit")].below
        fail = numbers[-1]
        if fail is not None and (fail > warn if below else fail < warn):
            raise UserError(f"--limit {text}: {name} would fail before it warns; swap the two")
        out[name] = Limit(warn, fail, below=below)
    return out
