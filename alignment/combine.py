"""Gradients of several objectives made into one direction d = sum_k a_k g_k.

Every method here chooses its coefficients a from inner products alone, so it sees the Gram matrix M = G G^T, [K, K],
and never the gradients: nobody holds a [K, parameters] matrix. With g_k the gradient of the *loss* of objective k and
w_k > 0 its weight:

name          direction                                                            what a weight means
gradient_sum  sum_k w_k g_k                                                        a factor
mgda          the shortest vector in the hull of g_k / w_k                         decrease of objective k ~ w_k
pcgrad        sum_k w_k g_k', g_k' = g_k without what conflicts with the others    a factor
cagrad        max_d min_k g_k.d  in the ball of radius c |g_0| around g_0          g_0 = sum_k w_k g_k / sum_k w_k
nash          max_d sum_k w_k log(g_k.d), then |d| <= max_norm                     bargaining power
gradvac       sum_k w_k g_k', g_k' turned towards the others until cos >= target   a factor

Papers: MGDA: Desideri 2012, Sener and Koltun 2018 (arXiv 1810.04650); PCGrad: Yu et al. 2020 (arXiv 2001.06782);
CAGrad: Liu et al. 2021 (arXiv 2110.14048); Nash-MTL: Navon et al. 2022 (arXiv 2202.01017); GradVac: Wang et al. 2021
(arXiv 2010.05874). The weights are ours, the papers have none: with equal ones these are the papers' methods, and mgda,
cagrad and nash depend on ratios of weights only. So is leaving out an objective whose gradient is exactly 0: a reward
that differs in no group would otherwise stop mgda, and nash would have no solution.

To add a method, write a function of a `Conflict` that returns [K] coefficients, and name it by its import path or
register it with `@COMBINERS.register("name")`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alignment.named import Registry

ROUNDING = 1e-12
"""Squared lengths below this share of the largest one are rounding, also of Gram matrices of fp32 gradients."""
_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """What a method sees; all float64 on the CPU.

    Args:
        gram: [K, K] inner products of the gradients, each of length above 0.
        weights: [K], above 0.
        memory: [K, K] what the method keeps from one step to the next, 0 at first; it may write into it. Saved in
            checkpoints.
        draw: where a random order comes from, keyed by the step.
    """

    gram: Tensor
    weights: Tensor
    memory: Tensor
    draw: torch.Generator

    def others(self, k: int, shuffle: bool) -> list[int]:
        """Every objective but k, in their order or in a drawn one."""
        count = len(self.gram)
        order = torch.randperm(count, generator=self.draw).tolist() if shuffle else range(count)
        return [j for j in order if j != k]


CombineFn = Callable[..., Tensor]
"""fn(conflict: Conflict, *, settings) -> [K] coefficients."""

COMBINERS: Registry[CombineFn] = Registry("gradient combination")


# ---------------------------------------------------------------------- methods


@COMBINERS.register("gradient_sum")
def gradient_sum(conflict: Conflict) -> Tensor:
    """sum_k w_k g_k: the gradient of the weighted sum of the losses."""
    return conflict.weights


@COMBINERS.register("mgda")
def mgda(conflict: Conflict, *, normalise: bool = False) -> Tensor:
    """The shortest convex combination of g_k / w_k. Along it objective k decreases in proportion to w_k, or faster.

    `normalise` takes gradients of length 1 (Sener and Koltun's `l2`); otherwise the shortest gradients decide. Sener
    and Koltun's code multiplies the result by K.
    """
    scale = 1 / _relative(conflict.weights)
    if normalise:
        scale = scale / conflict.gram.diagonal().sqrt()
    return min_norm(conflict.gram * torch.outer(scale, scale)) * scale


@COMBINERS.register("pcgrad")
def pcgrad(conflict: Conflict, *, threshold: float = 0.0, shuffle: bool = True) -> Tensor:
    """sum_k w_k g_k', where g_k' starts as g_k and, for each other objective j in turn, loses its component along g_j
    if its cosine with g_j is below -threshold.

    The result depends on the order for K > 2; the paper draws it.
    """
    gram, total = conflict.gram, torch.zeros_like(conflict.weights)
    for k, weight in enumerate(conflict.weights):
        own = _one(gram, k)
        for j in conflict.others(k, shuffle):
            if _cosine(gram, own, j) < -threshold:
                own[j] -= gram[j] @ own / gram[j, j]
        total += weight * own
    return total


@COMBINERS.register("gradvac")
def gradvac(conflict: Conflict, *, target: float | None = None, beta: float = 0.5, shuffle: bool = True) -> Tensor:
    """sum_k w_k g_k', where g_k' is turned towards each g_j until their cosine is at least a target.

    `target` None: for each pair a moving average of its cosine, of which `beta` is the share of the new value (LibMTL's
    value; the paper has 0.01). It is 0 at first, so the first step is PCGrad's.
    """
    gram, memory, total = conflict.gram, conflict.memory, torch.zeros_like(conflict.weights)
    for k, weight in enumerate(conflict.weights):
        own = _one(gram, k)
        for j in conflict.others(k, shuffle):
            cosine = _cosine(gram, own, j)
            wanted = float(memory[k, j]) if target is None else target
            wanted = min(max(wanted, -1 + 1e-6), 1 - 1e-6)
            if cosine < wanted:
                height = math.sqrt(1 - wanted**2)
                turn = (wanted * math.sqrt(1 - cosine**2) - cosine * height) / height
                own[j] += turn * math.sqrt(float(own @ gram @ own) / float(gram[j, j]))
            memory[k, j] = (1 - beta) * memory[k, j] + beta * cosine
        total += weight * own
    return total


@COMBINERS.register("cagrad")
def cagrad(conflict: Conflict, *, c: float = 0.5, rescale: bool = True) -> Tensor:
    """g_0 + c |g_0| g_v / |g_v| with v on the simplex minimising g_v.g_0 + c |g_0| |g_v|; with `rescale` divided by
    1 + c^2, as in the authors' code.

    For a given length t of g_v, v is the nearest point to the origin in the hull of g_k + (t / (c |g_0|)) g_0. The
    right t is where |g_v(t)| = t; left of it |g_v(t)| > t.
    """
    gram, share = conflict.gram, conflict.weights / conflict.weights.sum()
    along = gram @ share
    radius = c * math.sqrt(max(0.0, float(share @ along)))
    longest = math.sqrt(float(gram.diagonal().max()))
    if radius <= math.sqrt(ROUNDING) * longest:
        return share / (1 + c**2 if rescale else 1.0)

    def hull(t: float) -> tuple[Tensor, float]:
        lift = t / radius
        point = min_norm(gram + lift * (along[:, None] + along) + lift**2 * float(share @ along))
        return point, math.sqrt(max(0.0, float(point @ gram @ point)))

    low, high = 1e-6 * longest, longest
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if hull(middle)[1] > middle else (low, middle)
    # Where no combination has a length, t goes to its lower end and g_v / t to the shift that ends the conflict.
    coefficients = share + radius / low * hull(low)[0]
    return coefficients / (1 + c**2) if rescale else coefficients


@COMBINERS.register("nash")
def nash(conflict: Conflict, *, max_norm: float | None = 1.0) -> Tensor:
    """a_k (M a)_k = w_k, then scaled to |d| <= max_norm: the Nash bargaining solution (with unequal weights the
    asymmetric one).

    a minimises a.M a / 2 - sum_k w_k log a_k, by Newton's method. |d|^2 is the sum of the weights, K for equal ones,
    whatever the lengths of the gradients. Where no direction helps every objective there is no bargain: d = 0.
    """
    weights = _relative(conflict.weights)
    length = conflict.gram.diagonal().sqrt()
    gram = conflict.gram / torch.outer(length, length)
    meeting = min_norm(gram)
    if float(meeting @ gram @ meeting) <= ROUNDING:
        return torch.zeros_like(weights)
    a = weights.sqrt()
    for _ in range(_STEPS):
        slope = gram @ a - weights / a
        step = torch.linalg.solve(gram + torch.diag(weights / a**2), slope)
        decrement = math.sqrt(max(0.0, float(step @ slope) / float(weights.min())))
        a = a - step / (1 + decrement if decrement > 0.25 else 1.0)
        if decrement < 1e-9:
            break
    norm = math.sqrt(float(a @ gram @ a))
    return a / length * (1.0 if max_norm is None else min(1.0, max_norm / norm))


# ---------------------------------------------------------------------- the method of a run


class Combiner:
    """One method with its settings and what it remembers.

    Args:
        method: name or import path. settings: its keyword arguments. names: of the K objectives.

    Raises UserError for a method or a setting that does not exist.
    """

    def __init__(self, method: str, settings: Mapping[str, Any] | None, names: Sequence[str]) -> None:
        self._fn, self.method = COMBINERS.get(method, settings), method
        self.names = tuple(names)
        self.memory = torch.zeros(len(self.names), len(self.names), dtype=torch.float64)

    def __call__(self, gram: Tensor, weights: Tensor, draw: torch.Generator) -> Tensor:
        """[K, K], [K] -> [K] float64 coefficients; 0 where the gradient or the weight is."""
        gram, weights = gram.double().cpu(), weights.double().cpu()
        coefficients = torch.zeros_like(weights)
        kept = ((gram.diagonal() > 0) & (weights > 0)).nonzero()[:, 0]
        if not len(kept):
            return coefficients
        memory = self.memory[kept][:, kept]
        found = self._fn(Conflict(gram=gram[kept][:, kept], weights=weights[kept], memory=memory, draw=draw))
        if found.shape != kept.shape:
            raise ValueError(
                f"the gradient combination '{self.method}' returned {tuple(found.shape)} for {len(kept)} objectives; "
                "it must return one coefficient for each"
            )
        self.memory[kept[:, None], kept] = memory
        coefficients[kept] = found.double()
        return coefficients

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names), "memory": self.memory.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is remembered of objectives that are still there."""
        places = {name: i for i, name in enumerate(state["names"])}
        for k, name in enumerate(self.names):
            for j, other in enumerate(self.names):
                if name in places and other in places:
                    self.memory[k, j] = state["memory"][places[name]][places[other]]


# ---------------------------------------------------------------------- parts


def min_norm(gram: Tensor) -> Tensor:
    """[K, K] Gram matrix of points -> [K] convex weights of the point of their hull nearest to the origin.

    Wolfe's algorithm (1976): exact in finitely many steps, also for dependent points.
    """
    size = len(gram)
    small = ROUNDING * float(gram.diagonal().max())
    weights = _one(gram, int(gram.diagonal().argmin()))
    support = [int(weights.argmax())]
    best = math.inf
    while True:
        slopes = gram @ weights
        square = float(weights @ slopes)
        corner = int(slopes.argmin())
        if square >= best or corner in support or float(slopes[corner]) >= square - small:
            return weights
        best, support = square, [*support, corner]
        while True:
            flat = torch.zeros(size, dtype=gram.dtype)
            flat[support] = _affine_min_norm(gram[support][:, support])
            inside = [k for k in support if float(flat[k]) > 0]
            if len(inside) == len(support):
                weights = flat
                break
            out = [k for k in support if k not in inside]
            reach = min(float(weights[k] / (weights[k] - flat[k])) if float(weights[k]) > 0 else 0.0 for k in out)
            weights = weights + reach * (flat - weights)
            support = [k for k in support if k in inside or float(weights[k]) > ROUNDING]
            weights = torch.zeros_like(weights).index_copy(0, torch.tensor(support), weights[support])
            weights = weights / weights.sum()


def _affine_min_norm(gram: Tensor) -> Tensor:
    """The same over all combinations whose weights sum to 1, positive or not."""
    size = len(gram)
    system = torch.ones(size + 1, size + 1, dtype=gram.dtype)
    system[:size, :size], system[size, size] = gram / gram.diagonal().max(), 0.0
    right = torch.zeros(size + 1, 1, dtype=gram.dtype)
    right[size] = 1.0
    solution: Tensor = torch.linalg.lstsq(system, right, driver="gelsd").solution
    return solution[:size, 0]


def _relative(weights: Tensor) -> Tensor:
    return weights / weights.mean()


def _one(gram: Tensor, k: int) -> Tensor:
    out = torch.zeros(len(gram), dtype=gram.dtype)
    out[k] = 1.0
    return out


def _cosine(gram: Tensor, coefficients: Tensor, j: int) -> float:
    """Between the combination with these coefficients and gradient j; 0 for a combination of length 0."""
    square = float(coefficients @ gram @ coefficients)
    if square <= ROUNDING * float(gram.diagonal().max()):
        return 0.0
    return min(1.0, max(-1.0, float(gram[j] @ coefficients) / math.sqrt(square * float(gram[j, j]))))
