"""Rewards that look at the form of a completion."""

from __future__ import annotations

import re
from typing import Literal

from alignment.errors import UserError


class Format:
    """1 where a regular expression matches, 0 elsewhere.

    Args:
        pattern: Python regular expression; a dot matches line ends too.
        where: the pattern must match the `whole` completion, or be found `anywhere` in it.
    """

    def __init__(self, pattern: str, where: Literal["whole", "anywhere"] = "whole") -> None:
        if where not in ("whole", "anywhere"):
            raise UserError(f"where is '{where}'; use whole or anywhere")
        try:
            compiled = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"'{pattern}' is not a regular expression: {error}") from error
        self._match = compiled.fullmatch if where == "whole" else compiled.search

    def __call__(self, completion: str) -> float:
        return float(self._match(completion) is not None)


class RepetitionPenalty:
    """-largest * (1 - distinct n-grams / all n-grams) over token ids; 0 for a completion with fewer than n tokens.

    The form is that of Open-R1's n-gram penalty, after Yeo et al. 2025 (arXiv 2502.03373); tokens instead of words, so
    that it works for text without spaces.

    Args:
        n: length of the n-grams, in tokens.
        largest: the penalty approached by a completion that repeats one token for ever.
    """

    def __init__(self, n: int = 3, largest: float = 1.0) -> None:
        if n < 1 or not largest >= 0:
            raise UserError(f"n is {n} and largest {largest}; n is at least 1, and largest not negative")
        self.n, self.largest = n, largest

    def __call__(self, completion: str, completion_ids: list[int]) -> float:
        ngrams = list(zip(*(completion_ids[i:] for i in range(self.n)), strict=False))
        return -self.largest * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0
