"""Mathematical answers compared by what they mean, by math-verify (extra `rewards`)."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from typing import Any, Literal

from alignment.errors import UserError
from alignment.rewards.extra import needed

_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")
"""What begins mathematics in LaTeX, without which math-verify takes a text for plain."""


class MathVerify:
    r"""1 where the answer in a completion equals the expected one as mathematics, 0 elsewhere: 1/2, 0.5 and
    $\frac{1}{2}$ are equal, so are $\{1, 2\}$ and $\{2, 1\}$; an interval, a matrix, an equation are compared as such.

    Abstains where the row's answer is None or holds nothing that parses, and where parsing or comparing takes longer
    than `seconds` or breaks the library. A completion without an answer is wrong: 0. Of several answers the last one
    counts, but a \boxed one, or one after words such as "final answer is", before others; \boxed ones with a comma or
    full stop between them are read as one answer, the set of them: naming several does not help.

    Args:
        column: data column with the expected answer: LaTeX, with or without its dollars, or plain (`3/4`, `1,200`).
        accept: what counts as an answer in a completion: `any`, or only `latex` ($...$, \(...\), \[...\], \boxed{...}).
        seconds: whole seconds that parsing, and each comparison, may take; not kept in other threads than the main one.

    Only digits and operators, or LaTeX by a grammar, are ever parsed: an answer cannot run code.
    """

    def __init__(self, column: str = "answer", accept: Literal["any", "latex"] = "any", seconds: int = 5) -> None:
        if accept not in ("any", "latex"):
            raise UserError(f"accept is '{accept}'; use any or latex")
        if seconds < 1:
            raise UserError(f"seconds is {seconds}; it is at least 1")
        self._library = needed("math_verify", "math-verify")
        self._too_long = needed("math_verify.errors", "math-verify").TimeoutException
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)  # they warn of each time-out, and of having none
        latex, plain = self._library.LatexExtractionConfig(boxed_match_priority=0), self._library.ExprExtractionConfig()
        self._accepted = [latex] if accept == "latex" else [latex, plain]
        self._either = [latex, plain]
        self.needs_columns = (column,)
        self.column, self.seconds = column, seconds

    def __call__(self, completion: str, columns: Mapping[str, Any]) -> float | None:
        expected = columns[self.column]
        if expected is None:
            return None
        seconds = self.seconds if threading.current_thread() is threading.main_thread() else None  # by SIGALRM
        try:
            wanted = self._parsed(_as_mathematics(str(expected)), self._either, seconds)
            if not wanted:
                return None
            found = self._parsed(completion, self._accepted, seconds)
            return float(self._library.verify(wanted, found, timeout_seconds=seconds, raise_on_error=True))
        except (self._too_long, Exception):  # the first is no Exception; sympy raises anything on odd mathematics
            return None

    def _parsed(self, text: str, forms: list[Any], seconds: int | None) -> Any:
        return self._library.parse(
            text, extraction_config=forms, fallback_mode="no_fallback", parsing_timeout=seconds, raise_on_error=True
        )


def _as_mathematics(text: str) -> str:
    """An expected answer in a form that is read as a whole: bare LaTeX gets its dollars."""
    return f"${text}$" if "\\" in text and not _MARKED.search(text) else text
