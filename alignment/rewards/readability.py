"""How readable a reply is, by the formulas of textstat (extra `rewards`)."""

from __future__ import annotations

import re
from typing import Literal, get_args

from alignment.errors import UserError
from alignment.rewards.extra import needed

Formula = Literal[
    "automated_readability_index",
    "coleman_liau_index",
    "flesch_kincaid_grade",
    "flesch_reading_ease",
    "gunning_fog",
    "smog_index",
    "dale_chall_readability_score",
    "lix",
]

_OF_LETTERS = ("automated_readability_index", "coleman_liau_index", "lix")
"""Formulas that count letters and words; the others count syllables."""
_WORD = re.compile(r"[^\W_]")


class Readability:
    """1 where the readability of a reply lies within `target`, falling linearly to 0 at `falloff` outside of it.
    Abstains on a reply of fewer than `minimum_words` words, of which formulas say nothing.

    Args:
        target: lowest and highest value of the formula that is wanted.
        formula: `automated_readability_index` (4.71 characters per word + 0.5 words per sentence - 21.43),
            `coleman_liau_index`, `flesch_kincaid_grade`, `gunning_fog` and `smog_index` are years of school in the
            United States; `flesch_reading_ease` goes the other way, 100 is easy; `dale_chall_readability_score` and
            `lix` have scales of their own. All but the first two and `lix` count syllables, for English by the CMU
            dictionary, which must be there: `python -m nltk.downloader cmudict`, once.
        falloff: distance from the target at which the value is 0, in units of the formula. Null: the target's width.
        language: code of the language, such as `en_US`, `de` or `es`; constants of Flesch's formulas follow it.
        minimum_words: see above.
    """

    def __init__(
        self,
        target: tuple[float, float],
        formula: Formula = "automated_readability_index",
        falloff: float | None = None,
        language: str = "en_US",
        minimum_words: int = 5,
    ) -> None:
        if len(target) != 2 or not float("-inf") < target[0] <= target[1] < float("inf"):
            raise UserError(f"target is {list(target)}; it is [lowest, highest], both finite")
        if formula not in get_args(Formula):
            raise UserError(f"formula is '{formula}'; use {', '.join(get_args(Formula))}")
        self.low, self.high = target
        self.falloff = self.high - self.low if falloff is None else falloff
        if not self.falloff > 0:
            raise UserError("falloff must be positive; a target without a width needs one")
        self.minimum_words = minimum_words
        if formula not in _OF_LETTERS and language.lower().startswith("en"):
            _check_dictionary(formula)
        # An object of our own: the library's keeps one language for everybody.
        library = type(needed("textstat", "textstat").textstat)()
        library.set_lang(language)
        self._formula = getattr(library, formula)
        try:
            self._formula("It can be told here whether the language is known.")
        except (KeyError, OSError) as error:
            raise UserError(f"textstat does not know the language '{language}' ({error})") from error

    def __call__(self, completion: str) -> float | None:
        if sum(_WORD.search(word) is not None for word in completion.split()) < self.minimum_words:
            return None
        value = float(self._formula(completion))
        outside = max(self.low - value, value - self.high, 0.0)
        return max(0.0, 1 - outside / self.falloff)


def _check_dictionary(formula: str) -> None:
    """Raise UserError where textstat would have to fetch the dictionary while rewards are computed."""
    try:
        needed("nltk", "nltk").data.find("corpora/cmudict")
    except LookupError as error:
        raise UserError(
            f"formula {formula} counts syllables by the CMU dictionary, which is not here: run `python -m "
            f"nltk.downloader cmudict` once, or use {' or '.join(_OF_LETTERS)}"
        ) from error
