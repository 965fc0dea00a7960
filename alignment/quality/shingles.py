"""Texts that are nearly the same: candidates by MinHash and locality-sensitive hashing, each confirmed exactly.

A text is its set of shingles, runs of `size` words. Broder (On the resemblance and containment of documents, 1997)
gives the MinHash; b bands of r rows find a pair of similarity s with probability 1 - (1 - s^r)^b. The bands are chosen
so that 99 of 100 pairs at the threshold are found (more similar ones more surely); what is found is compared by its
shingles, so no pair below the threshold is ever told.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from alignment.quality.findings import needed

_PERMUTATIONS = 128
_RECALL = 0.99
_MOST_CANDIDATES = 200
"""Earlier texts that a text is compared with: of a thousand answers to one long prompt all would be candidates."""
# A word, a sign, or a character of a script that has no spaces between words (Thai, kana, Han).
_UNSPACED = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]"
_WORD = re.compile(rf"{_UNSPACED}|(?:(?!{_UNSPACED})\w)+|[^\w\s]")


def words(text: str) -> list[str]:
    """Words and signs of a text, without case."""
    return _WORD.findall(text.casefold())


def shingles(text: str, size: int, tag: int = 0) -> np.ndarray:
    """[K] sorted uint32 digests of the runs of `size` words; a shorter text is one shingle. Digests of different `tag`
    are different."""
    found = words(text)
    runs = {" ".join(found[i : i + size]) for i in range(max(1, len(found) - size + 1))}
    return np.unique(np.fromiter((zlib.crc32(run.encode("utf-8", "replace"), tag) for run in runs), dtype=np.uint32))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Shared shingles by all shingles; 1 of two empty sets."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    union = len(a) + len(b) - both
    return both / union if union else 1.0


def bands(similarity: float) -> tuple[int, int]:
    """(bands, rows of each): the longest rows that still find 99 of 100 pairs of this similarity."""
    for rows in range(_PERMUTATIONS // 2, 1, -1):
        count = _PERMUTATIONS // rows
        if 1 - (1 - similarity**rows) ** count >= _RECALL:
            return count, rows
    return _PERMUTATIONS, 1


def near(
    parts: Sequence[Sequence[np.ndarray]], similarity: float, check: str, known: int | None = None
) -> list[int | None]:
    """For each text the first earlier one that is as similar in every part, or None.

    Args:
        parts: of each text the shingles of its parts (such as prompt and completions), tagged by part.
        similarity: least Jaccard similarity of each part. Where every part reaches it their union does, so the union
            finds the candidates.
        check: for the line that says which package is missing.
        known: given, texts are compared with the first so many only, and these with none.
    """
    datasketch = needed("datasketch", check)
    count, rows = bands(similarity)
    index = datasketch.MinHashLSH(num_perm=_PERMUTATIONS, params=(count, rows))
    unions = (np.concatenate(list(text)).tolist() for text in parts)
    out: list[int | None] = []
    for number, sketch in enumerate(datasketch.MinHash.generator(unions, num_perm=_PERMUTATIONS, hashfunc=int)):
        asks = known is None or number >= known
        candidates = sorted(index.query(sketch))[:_MOST_CANDIDATES] if asks else []
        out.append(next((c for c in candidates if _alike(parts[number], parts[c], similarity)), None))
        if known is None or number < known:
            index.insert(number, sketch, check_duplication=False)
    return out


def _alike(a: Sequence[np.ndarray], b: Sequence[np.ndarray], similarity: float) -> bool:
    return len(a) == len(b) and all(jaccard(x, y) >= similarity for x, y in zip(a, b, strict=True))
