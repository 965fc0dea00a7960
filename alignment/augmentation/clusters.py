"""Clusters of prompts by meaning, and whether a new prompt lies inside the one it was made from.

Inside means: no other cluster's centre is nearer, and the distance to the centre is at most a quantile of the distances
of the cluster's own members. A new prompt must also be new: not equal to one that is there, blind to case and white
space, and not nearly equal, by the share of five-character pieces that two texts have in common (Jaccard similarity).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from alignment.randomness import derive

PIECE = 5
"""Characters of a piece."""


class Clusters:
    """k-means clusters of the prompts of a file.

    Args:
        vectors: [N, D] of length 1.
        count: clusters. None: the square root of N / 2, a rule of thumb (Mardia et al. 1979).
        quantile: of the members' distances, up to which a new prompt is inside.
        seed: of the first centres.

    Attributes:
        of: [N] the cluster of each vector. centres: [K, D]. radius: [K] the quantile of each cluster's distances.
    """

    def __init__(self, vectors: np.ndarray, *, count: int | None, quantile: float, seed: int) -> None:
        from sklearn.cluster import KMeans  # here: see alignment.augmentation.embedding

        wanted = round(math.sqrt(len(vectors) / 2)) if count is None else count
        # More clusters than different vectors cannot be had.
        number = max(1, min(wanted, len(np.unique(vectors.round(9), axis=0))))
        start = derive(seed, "clusters") % 2**32
        made: Any = KMeans(n_clusters=number, n_init=10, random_state=start).fit(vectors)
        self.of: np.ndarray = made.labels_
        self.centres: np.ndarray = made.cluster_centers_
        distance = self.distance(vectors, self.of)
        members = [distance[self.of == k] for k in range(len(self.centres))]
        self.radius = np.array([np.quantile(own, quantile) if len(own) else 0.0 for own in members])

    def distance(self, vectors: np.ndarray, clusters: Sequence[int] | np.ndarray) -> np.ndarray:
        """[M, D] vectors and a cluster for each -> [M] Euclidean distance to its centre."""
        found: np.ndarray = np.linalg.norm(vectors - self.centres[np.asarray(clusters)], axis=1)
        return found

    def inside(self, vectors: np.ndarray, clusters: Sequence[int]) -> np.ndarray:
        """[M, D] vectors and the cluster of each's source -> [M] bool: whether it lies inside that."""
        if not len(vectors):
            return np.zeros(0, dtype=np.bool_)
        own = np.asarray(clusters)
        distances = np.linalg.norm(vectors[:, None] - self.centres[None], axis=2)
        mine = self.distance(vectors, own)
        # As far as rounding goes: a copy of the outermost member is inside.
        found: np.ndarray = (distances.argmin(axis=1) == own) & (mine <= self.radius[own] + 1e-9)
        return found


def pieces(text: str) -> frozenset[str]:
    """The five-character pieces of a text, blind to case and white space; a shorter text is one piece."""
    plain = " ".join(text.casefold().split())
    return frozenset(plain[i : i + PIECE] for i in range(max(1, len(plain) - PIECE + 1)))


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """Jaccard similarity: the share of the pieces of either that both have."""
    return len(a & b) / len(a | b)
