"""How well a reply matches the FAQ: by its words (BM25) or by its meaning (sentence embeddings)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from alignment.errors import UserError
from alignment.rewards.extra import needed

K1, B = 1.5, 0.75  # of BM25: how fast a repeated term counts less, how much long entries count less
_TERM = re.compile(r"\w+")


class FaqMatch:
    """Match of a reply with the FAQ entry of its row, from 0 to 1; of several entries the best one counts. Abstains
    where the row has none. An empty reply matches nothing: 0.

    `bm25`: the BM25 score of the reply's distinct words for the entry, divided by that of the entry's own words: the
    share of the entry's weight that the reply covers. A word that stands f times in an entry of length l weighs
    ln((N + 1) / n) f (k1 + 1) / (f + k1 (1 - b + b l / mean l)), for N entries of which n hold it (Trotman et al. 2014;
    rank-bm25's BM25Plus without its bonus for absent words); without `faq` the row's entries are all there is. A longer
    reply can only cover more: pair it with `Efficiency`.

    `embedding`: the cosine of the two texts under a sentence-transformers model, 0 where negative.

    Args:
        column: data column with the entry, a text or a list of texts.
        method: `bm25` or `embedding`.
        faq: for `bm25`: a text file with an entry a line, from which words get their weights.
        model: for `embedding`: local folder or hub id of a sentence-transformers model with safetensors weights.
        device: for `embedding`: null: the current GPU if there is one (workers see none), else the CPU.
        batch_size: for `embedding`: texts in one forward.

    The extra `rewards` brings both packages.
    """

    def __init__(
        self,
        column: str = "answer",
        method: Literal["bm25", "embedding"] = "bm25",
        faq: str | None = None,
        model: str | None = None,
        device: str | None = None,
        batch_size: int = 64,
    ) -> None:
        self.needs_columns = (column,)
        self.column = column
        if method == "bm25":
            if model is not None:
                raise UserError("model is for method: embedding; bm25 has none")
            self._match: _Terms | _Meaning = _Terms(_entries_of(faq) if faq is not None else [])
        elif method == "embedding":
            if model is None or faq is not None:
                raise UserError("method embedding takes a model (a local folder or hub id), and no faq")
            self._match = _Meaning(model, device, batch_size)
        else:
            raise UserError(f"method is '{method}'; use bm25 or embedding")

    def __call__(self, completions: list[str], columns: list[Mapping[str, Any]]) -> list[float | None]:
        return self._match(completions, [self._entries(row.get(self.column)) for row in columns])

    def _entries(self, value: object) -> tuple[str, ...]:
        """The entries of a row that say something."""
        if isinstance(value, list | tuple):
            return tuple(text for item in value for text in self._entries(item))
        return () if value is None or not str(value).strip() else (str(value),)


class _Terms:
    """BM25 of replies for entries, as shares of the most there is."""

    def __init__(self, corpus: Sequence[str]) -> None:
        self._bm25 = needed("rank_bm25", "rank-bm25").BM25Plus
        self._corpus = [words for text in corpus if (words := terms(text))]
        self._place = {tuple(words): i for i, words in enumerate(self._corpus)}
        self._whole = self._index(self._corpus) if self._corpus else None
        # Completions of a group ask for the same entries; in `__init__` so that an instance's cache goes with it.
        self._indexed = lru_cache(maxsize=1024)(self._index_of)

    def __call__(self, replies: Sequence[str], entries: Sequence[tuple[str, ...]]) -> list[float | None]:
        return [self._covered(reply, wanted) for reply, wanted in zip(replies, entries, strict=True)]

    def _covered(self, reply: str, entries: tuple[str, ...]) -> float | None:
        wanted = tuple(words for text in entries if (words := tuple(terms(text))))
        if not wanted:
            return None
        index, places = self._indexed(wanted)
        said = sorted(set(terms(reply)))
        shares = []
        for words, place in zip(wanted, places, strict=True):
            (found,) = index.get_batch_scores(said, [place])
            (most,) = index.get_batch_scores(sorted(set(words)), [place])
            shares.append(float(found) / float(most))
        return max(shares)

    def _index_of(self, entries: tuple[tuple[str, ...], ...]) -> tuple[Any, list[int]]:
        """An index that holds these entries, and where in it they are."""
        if self._whole is not None and all(words in self._place for words in entries):
            return self._whole, [self._place[words] for words in entries]
        new = [list(words) for words in entries if words not in self._place]
        places, after = [], len(self._corpus)
        for words in entries:
            places.append(self._place.get(words, after))
            after += words not in self._place
        return self._index([*self._corpus, *new]), places

    def _index(self, corpus: Sequence[Sequence[str]]) -> Any:
        return self._bm25(corpus, k1=K1, b=B, delta=0)


class _Meaning:
    """Cosines of replies and entries under a sentence-transformers model."""

    def __init__(self, name: str, device: str | None, batch_size: int) -> None:
        from alignment.rewards.model import place_of
        from alignment.sources import loading

        folder = Path(name).expanduser()
        if folder.is_dir() and not any(folder.rglob("*.safetensors")):
            raise UserError(f"'{folder}' has no *.safetensors weights; name a sentence-transformers model that has")
        if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise UserError(f"no model folder '{name}'")
        library = needed("sentence_transformers", "sentence-transformers")
        with loading(f"sentence-transformers model '{name}'"):
            self._model = library.SentenceTransformer(
                str(folder) if folder.is_dir() else name,
                device=str(place_of(device)),
                model_kwargs={"use_safetensors": True},
                local_files_only=folder.is_dir(),
            )
        self._batch_size = batch_size

    def __call__(self, replies: Sequence[str], entries: Sequence[tuple[str, ...]]) -> list[float | None]:
        """Each distinct text is embedded once."""
        pairs = [(r, w) for r, w in zip(replies, entries, strict=True) if r.strip() and w]
        texts = sorted({text for reply, wanted in pairs for text in (reply, *wanted)})
        vectors = self._embedded(texts)
        values: list[float | None] = []
        for reply, wanted in zip(replies, entries, strict=True):
            if not wanted:
                values.append(None)
            elif not reply.strip():
                values.append(0.0)
            else:
                values.append(max(0.0, *(float(vectors[reply] @ vectors[entry]) for entry in wanted)))
        return values

    def _embedded(self, texts: Sequence[str]) -> dict[str, Any]:
        """Text -> vector of length 1, float32."""
        if not texts:
            return {}
        found = self._model.encode(
            list(texts),
            batch_size=self._batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return dict(zip(texts, found.astype("float32"), strict=True))


def terms(text: str) -> list[str]:
    """Words and numbers in order, without regard to case."""
    return _TERM.findall(text.casefold())


def _entries_of(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"faq '{path}' cannot be read as text: {error}") from error
    if not any(terms(line) for line in lines):
        raise UserError(f"faq '{path}' has no line with a word in it; it is an entry a line")
    return lines
