"""Rewards that pull the trunk apart: what each may still do to it, and how strong it is.

    trunk gets sum_k w_k s_k g_k' + the gradient of the penalties       g_k gradient of reward k's loss, w_k its weight

mode      g_k'
none      g_k
project   g_k without its component along each g_j with cos(g_k', g_j) < -threshold, in the order of the rewards
block     0 where cos(g_k, sum of the others) < -threshold; if that leaves nothing, the reward of largest weight stays
scale     threshold g_k
gradvac   g_k turned towards each g_j until their cosine is the threshold
gate      0 where the mean fusion weight of head k is below the threshold

With a threshold, two exactly opposed rewards that are projected leave nothing of each other: the trunk then serves
neither, which is why isolation is off unless asked for. PCGrad (arXiv 2001.06782) is `project` with threshold 0;
gradvac: arXiv 2010.05874. All of them are functions of inner products (`alignment.combine`).

Ratio control: s_k of `alignment.gradient_ratio`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from alignment.combine import COMBINERS, Combiner, Conflict
from alignment.components import Objectives
from alignment.errors import UserError
from alignment.gradient_ratio import averaged, deviations, factors
from alignment.metrics import Metrics
from alignment.randomness import generator

IsolationMode = Literal["none", "project", "block", "scale", "gradvac", "gate"]
Level = Literal["parameters", "states"]

WATCHED, OFTEN = 50, 0.9


@dataclass(kw_only=True)
class IsolationConfig:
    """What conflicting rewards may do to the shared trunk.

    Args:
        mode: see alignment.isolation. `none` needs one backward pass, the others one for each reward and one more.
        threshold: a cosine, a factor or a fusion weight, as the mode says.
        level: where gradients are compared: at all `parameters` of the trunk, or at its last `states`, which is one
            forward pass in place of the backward passes.
        ratio: name -> share of the gradient's length that a reward should have; rewards that are not named have 1.
            Null: lengths stay as they are.
        measure_every: without mode and ratio, updates from one to the next at which the rewards' gradients are taken
            one by one all the same, to log their norms and cosines; it changes no weight, but keeps as many
            gradients as a mode would. 0: never.
    """

    mode: IsolationMode = "none"
    threshold: float = 0.25
    level: Level = "parameters"
    ratio: dict[str, float] | None = None
    measure_every: int = 0

    def __post_init__(self) -> None:
        for name, value, kinds in (("mode", self.mode, IsolationMode), ("level", self.level, Level)):
            if value not in get_args(kinds):
                raise UserError(f"isolation.{name} is '{value}'; it is one of {', '.join(get_args(kinds))}")
        if not 0 <= self.threshold < 1:
            raise UserError(f"isolation.threshold is {self.threshold}; it is at least 0 and below 1")
        if self.ratio is not None and not all(share > 0 for share in self.ratio.values()):
            raise UserError("isolation.ratio has a share that is not above 0")
        if self.measure_every < 0:
            raise UserError(f"isolation.measure_every is {self.measure_every}; use at least 1, or 0 for never")

    @property
    def needed(self) -> bool:
        """Whether the trunk's gradient has to be made of those of the rewards."""
        return self.mode != "none" or self.ratio is not None


@COMBINERS.register("block")
def block(conflict: Conflict, *, threshold: float = 0.25) -> Tensor:
    """w_k g_k, without objectives whose cosine with the sum of all others is below -threshold."""
    gram, weights = conflict.gram, conflict.weights
    others = 1 - torch.eye(len(gram), dtype=gram.dtype)
    along = (gram * others).sum(1)
    squares = torch.einsum("kj,ji,ki->k", others, gram, others)
    cosine = along / (gram.diagonal() * squares).clamp(min=1e-300).sqrt()
    kept = cosine >= -threshold
    if not bool(kept.any()):
        kept[int(weights.argmax())] = True
    return torch.where(kept, weights, 0.0)


_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "project": ("pcgrad", {"shuffle": False}),
    "gradvac": ("gradvac", {"shuffle": False}),
    "block": ("block", {}),
}
_THRESHOLD = {"project": "threshold", "gradvac": "target", "block": "threshold"}


class Isolation:
    """The coefficients of the rewards' gradients at each step.

    Args:
        config: see IsolationConfig. weights: name -> w of every reward.

    Raises UserError for a share of a reward that does not exist.
    """

    def __init__(self, config: IsolationConfig, weights: Mapping[str, float]) -> None:
        self.config = config
        ratio = config.ratio or {}
        if unknown := sorted(set(ratio) - set(weights)):
            raise UserError(f"isolation.ratio names {', '.join(unknown)}, no reward; there are {', '.join(weights)}")
        self.names = tuple(name for name, weight in weights.items() if weight > 0)
        self.weights = torch.tensor([weights[name] for name in self.names], dtype=torch.float64)
        self.ratio = torch.tensor([float(ratio.get(name, 1.0)) for name in self.names], dtype=torch.float64)
        method, settings = _METHODS.get(config.mode, ("gradient_sum", {}))
        if config.mode in _THRESHOLD:
            settings = {**settings, _THRESHOLD[config.mode]: config.threshold}
        self._combiner = Combiner(method, settings, self.names)
        self._norms: Tensor | None = None
        self._last: deque[set[tuple[str, str]]] = deque(maxlen=WATCHED)

    def coefficients(
        self, found: Objectives, alpha: Tensor, more: Mapping[str, float] | None = None
    ) -> tuple[Tensor, Metrics]:
        """([K] coefficients; `grad/isolated/NAME`, 1 where a reward lost something, and `grad/ratio/NAME`, the length
        of its gradient over what its share would make it).

        Args:
            found: gradients of the rewards `names`. alpha: [K] mean fusion weights.
            more: name -> factor besides, of those that have one.
        """
        besides = torch.tensor([(more or {}).get(name, 1.0) for name in self.names], dtype=torch.float64)
        strength = self.weights * besides * self._balance(found.norms)
        if self.config.mode == "gate":
            strength = torch.where(alpha.double().cpu() < self.config.threshold, 0.0, strength)
        if self.config.mode == "scale":
            strength = strength * self.config.threshold
        chosen = self._combiner(found.gram, strength, generator(0, "isolation"))
        cut = (chosen - strength).abs() > 1e-9 * strength.abs().max()
        cut |= strength == 0
        one = torch.ones((), dtype=torch.float64)
        metrics: Metrics = {f"grad/isolated/{n}": (cut[k].double(), one) for k, n in enumerate(self.names)}
        assert self._norms is not None
        for name, value in zip(self.names, deviations(self._norms, self.ratio), strict=True):
            metrics[f"grad/ratio/{name}"] = (value, one)
        self._watch(found)
        return chosen, metrics

    def _balance(self, norms: Tensor) -> Tensor:
        """[K] factors s_k; 1 without ratio control and for a reward without a gradient."""
        self._norms = averaged(self._norms, norms)
        return torch.ones_like(norms) if self.config.ratio is None else factors(self._norms, self.ratio)

    def _watch(self, found: Objectives) -> None:
        norms, opposed = found.norms, set()
        for j, k in combinations(range(len(self.names)), 2):
            if float(found.gram[j, k]) < -self.config.threshold * float(norms[j] * norms[k]):
                opposed.add((self.names[j], self.names[k]))
        self._last.append(opposed)

    @property
    def warning(self) -> str:
        """Two rewards that isolation keeps from the trunk almost always; "" if there are none."""
        if self.config.mode not in ("project", "block") or len(self._last) < WATCHED:
            return ""
        for pair in sorted(set().union(*self._last)):
            if sum(pair in opposed for opposed in self._last) > OFTEN * WATCHED:
                return (
                    f"rewards {pair[0]} and {pair[1]} are opposed in more than {OFTEN:.0%} of the last {WATCHED} "
                    "updates, and isolation takes both from the trunk: it may serve neither (isolation.mode none)"
                )
        return ""

    def state_dict(self) -> dict[str, Any]:
        norms = None if self._norms is None else dict(zip(self.names, self._norms.tolist(), strict=True))
        return {"combiner": self._combiner.state_dict(), "norms": norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._combiner.load_state_dict(state["combiner"])
        norms = state["norms"]
        if norms is not None and set(norms) == set(self.names):
            self._norms = torch.tensor([norms[name] for name in self.names], dtype=torch.float64)

