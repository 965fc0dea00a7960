"""Rewards of a completion's length in tokens, the end of text included."""

from __future__ import annotations

import math

from alignment.errors import UserError


class Efficiency:
    """1 / (1 + ln tokens), tokens at least 1: 1 for one token, 0.19 for 64."""

    def __call__(self, completion: str, completion_ids: list[int]) -> float:
        return 1 / (1 + math.log(max(1, len(completion_ids))))


class LengthWithin:
    """1 where a completion has at least `minimum` and at most `maximum` tokens, 0 elsewhere.

    With `maximum` alone it is the length reward of GDPO (arXiv 2601.05242), to be conditioned on a right answer.
    """

    def __init__(self, maximum: int | None = None, minimum: int = 0) -> None:
        if minimum < 0 or (maximum is not None and maximum < minimum):
            raise UserError(f"minimum is {minimum} and maximum {maximum}; 0 <= minimum <= maximum is needed")
        self.minimum, self.maximum = minimum, maximum

    def __call__(self, completion: str, completion_ids: list[int]) -> float:
        tokens = len(completion_ids)
        return float(self.minimum <= tokens and (self.maximum is None or tokens <= self.maximum))


class SoftOverlong:
    """0 up to max_tokens - buffer, then falling linearly to -1 at max_tokens; -1 beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    Args:
        max_tokens: the longest completion that is sampled.
        buffer: tokens before that at which the penalty begins.
    """

    def __init__(self, max_tokens: int, buffer: int) -> None:
        if not 0 < buffer <= max_tokens:
            raise UserError(f"buffer is {buffer} and max_tokens {max_tokens}; 0 < buffer <= max_tokens is needed")
        self.max_tokens, self.buffer = max_tokens, buffer

    def __call__(self, completion: str, completion_ids: list[int]) -> float:
        over = len(completion_ids) - (self.max_tokens - self.buffer)
        return -min(1.0, max(0, over) / self.buffer)
