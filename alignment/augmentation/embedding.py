"""Texts as vectors of length 1, near each other where texts mean alike.

lsa      latent semantic analysis (Deerwester et al. 1990): TF-IDF of words and word pairs, reduced by a truncated
         SVD. It needs nothing but scikit-learn and knows no word that is not in the texts it was made of
a model  a sentence-transformers model by its folder or hub id
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from alignment.errors import UserError
from alignment.randomness import derive
from alignment.sources import loading

LSA = "lsa"
DIMENSIONS = 100
"""Of LSA; 100 to 300 is what its literature uses, and small files have fewer words than that."""


class Embedder(Protocol):
    """Turns texts into vectors."""

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """N texts -> [N, D] float64, rows of length 1; 0 for a text of which nothing is known."""
        ...


def load_embedder(name: str, texts: Sequence[str], seed: int) -> Embedder:
    """`lsa` made of `texts`, else the sentence-transformers model called `name`. Raises UserError where that cannot be
    had."""
    return Lsa(texts, seed) if name == LSA else SentenceModel(name)


class Lsa:
    """Latent semantic analysis.

    Args:
        texts: what its words and their weights are taken from.
        seed: of the truncated SVD's start.

    Raises UserError where `texts` hold too few different words.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        from sklearn.decomposition import TruncatedSVD  # here: a plain run does without scikit-learn
        from sklearn.feature_extraction.text import TfidfVectorizer

        # One-letter words count too: with the default pattern "What is x?" and "What is y?" would be the same.
        self._words: Any = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", ngram_range=(1, 2), sublinear_tf=True)
        try:
            weights = self._words.fit_transform(texts)
        except ValueError as error:  # an empty vocabulary
            raise UserError("the prompts hold no words to tell them apart by; name a model with --embedding") from error
        most = min(weights.shape) - 1
        if most < 1:
            raise UserError(
                f"{weights.shape[0]} prompts with {weights.shape[1]} different words cannot be clustered; give more "
                "prompts, or a model with --embedding"
            )
        start = derive(seed, "lsa") % 2**32
        self._reduced: Any = TruncatedSVD(n_components=min(DIMENSIONS, most), random_state=start).fit(weights)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return unit(self._reduced.transform(self._words.transform(texts)))


class SentenceModel:
    """A sentence-transformers model, on a GPU where there is one.

    Args:
        name: a folder or a hub id. Code that ships with a model is not run, and weights are read from safetensors only.

    Raises UserError without the package, and for what is no such model.
    """

    def __init__(self, name: str) -> None:
        try:
            library: Any = importlib.import_module("sentence_transformers")
        except ImportError as error:
            raise UserError(
                f"--embedding {name} needs sentence-transformers: pip install 'lightning-alignment[rewards]'; or take "
                f"--embedding {LSA}"
            ) from error
        folder = Path(name).expanduser()
        if not folder.is_dir() and name.startswith((".", "/", "~")):
            raise UserError(f"no model folder '{name}' for --embedding")
        if folder.is_dir() and not any(folder.rglob("*.safetensors")):
            raise UserError(f"'{folder}' has no *.safetensors weights; name a sentence-transformers model that has")
        with loading(f"the sentence-transformers model '{name}'"):
            self._model: Any = library.SentenceTransformer(
                str(folder) if folder.is_dir() else name,
                trust_remote_code=False,
                local_files_only=folder.is_dir(),
                model_kwargs={"use_safetensors": True},
            )

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return unit(self._model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False))


def unit(vectors: Any) -> np.ndarray:
    """[N, D] -> [N, D] float64 with rows of length 1; rows of zeros stay."""
    rows = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    out: np.ndarray = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return out
