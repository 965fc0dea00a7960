"""Settings of policies with heads (`alignment.heads`): the sub-policies, their fusion, their size, their start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from alignment.errors import UserError
from alignment.settings import as_config

Between = Literal["mean", "last", "rate"]
Pool = Literal["log_linear", "linear"]
Mode = Literal["joint", "decode_only"]


@dataclass(kw_only=True)
class HeadsConfig:
    """The sub-policies.

    Args:
        rank: width r of a head's hidden layer. Null: a quarter of the trunk's width, at least 8.
        scaled: divide a head's output by sqrt(r), so that its first steps do not depend on the rank.
        kl: weight of each head's own KL to the reference, over the whole vocabulary. At 0 nothing bounds a head, and
            the heads of opposed rewards pull apart without end.
        kl_every: take that KL at every n-th token of a completion, the first of them drawn.
        every: heads step on their mean gradient over this many steps of the trunk.
        between: what becomes of the gradients in between: `mean` as said, `last` drops all but the last one, `rate`
            lets heads step with the trunk, at 1 / every of its learning rate.
    """

    rank: int | None = None
    scaled: bool = True
    kl: float = 0.02
    kl_every: int = 16
    every: int = 3
    between: Between = "mean"

    def __post_init__(self) -> None:
        for name in ("rank", "kl_every", "every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"heads.{name} is {value}; it must be at least 1")
        if not self.kl >= 0:
            raise UserError(f"heads.kl is {self.kl}; it must be at least 0")
        _one_of("heads.between", self.between, get_args(Between))


@dataclass(kw_only=True)
class FusionConfig:
    """How sub-policies become one policy.

    Args:
        pool: `log_linear`: the normalised weighted product of the sub-policies; `linear`: their weighted mean.
        mode: `joint`: completions are drawn from the fused policy and everything is trained together; `decode_only`:
            each head is trained on completions of its own, trunk and fusion stay as they are, heads are fused only to
            evaluate and to export.
        width: width of an attention head. Null: the trunk's width divided by the number of rewards, at least 8.
        temperature: tau, divides the scores; high: the preference alone decides.
        entropy: weight of the bonus for even fusion weights.
        weights: name -> preference at evaluation and export, in place of the rewards' weights; rewards that are not
            named keep theirs. Training does not see it.
    """

    pool: Pool = "log_linear"
    mode: Mode = "joint"
    width: int | None = None
    temperature: float = 1.0
    entropy: float = 0.01
    weights: dict[str, float] | None = None

    def __post_init__(self) -> None:
        _one_of("fusion.pool", self.pool, get_args(Pool))
        _one_of("fusion.mode", self.mode, get_args(Mode))
        if self.width is not None and self.width < 1:
            raise UserError(f"fusion.width is {self.width}; it must be at least 1")
        if not self.temperature > 0 or not self.entropy >= 0:
            raise UserError(
                f"fusion.temperature is {self.temperature} and fusion.entropy {self.entropy}; they are above 0 and at "
                "least 0"
            )


@dataclass(kw_only=True)
class BudgetConfig:
    """Shares of the trained parameters. The trunk's is what the policy trains (all of it, or its adapters); the rank of
    the heads and the width of the fusion follow from it, whatever they are set to.

    Args:
        trunk, heads, fusion: in any unit, for example 70 : 30 : 10.
    """

    trunk: float = 70.0
    heads: float = 30.0
    fusion: float = 10.0

    def __post_init__(self) -> None:
        if not min(self.trunk, self.heads, self.fusion) > 0:
            raise UserError(f"budget is {self.trunk} : {self.heads} : {self.fusion}; each share must be above 0")

    def fit(self, trunk: int, hidden: int, count: int) -> tuple[int, int]:
        """(rank, width) for `count` heads beside `trunk` trained parameters. Both parts cost 2 count hidden each."""
        unit = trunk / self.trunk / (2 * count * hidden)
        return max(1, round(self.heads * unit)), max(1, round(self.fusion * unit))


@dataclass(kw_only=True)
class ColdStartConfig:
    """Training each head by itself before anything else: on completions drawn from it, with its reward alone, while
    trunk and fusion stay as they are.

    Args:
        rollouts: batches for each reward.
        epochs: passes over the prompts for each reward; added to `rollouts`. Null: none; with `preset: brief` 3, unless
            `rollouts` says how many.
    """

    rollouts: int = 0
    epochs: float | None = None

    def __post_init__(self) -> None:
        if self.rollouts < 0 or not 0 <= (self.epochs or 0) < math.inf:
            epochs = self.epochs or 0
            raise UserError(f"cold_start is {self.rollouts} rollouts and {epochs} epochs; both are at least 0")


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "amended": {},
    "brief": {
        "heads": {"rank": 64, "scaled": False, "kl": 0.0},
        "isolation": {"mode": "project", "threshold": 0.25},
        "cold_start": {"epochs": 3.0},
    },
}
"""Name -> part -> settings. `brief` is DecoupledPO as it was described, without the amendments that are defaults."""

T = TypeVar("T")


def preset_values(name: str) -> dict[str, dict[str, Any]]:
    """Raises UserError for a preset that does not exist."""
    _one_of("preset", name, list(PRESETS))
    return PRESETS[name]


def with_preset(cls: type[T], given: T | Mapping[str, Any], values: Mapping[str, Any] | None) -> T:
    """A config with `values` for those of its fields that are at their default."""
    config, default = as_config(cls, given), cls()
    changed = {n: value for n, value in (values or {}).items() if getattr(config, n) == getattr(default, n)}
    return replace(config, **changed)  # type: ignore[type-var]


def _one_of(name: str, value: str, kinds: Sequence[str]) -> None:
    if value not in kinds:
        raise UserError(f"{name} is '{value}'; it is one of {', '.join(kinds)}")
