"""Stages of a run: how long each one is, and what it sets or ramps. `callbacks.Stages` walks through them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

from alignment.controllers import Plateau
from alignment.errors import UserError

MIX = "data.mix."
"""Beginning of the names of shares in the data's mix."""
FRACTION = "data.fraction"
"""The share of the training rows in use, those of the highest confidence."""

ROUNDING = 1e-6

T = TypeVar("T")

Amount = float | str
"""A value, or "x5" for five times the configured one."""


@dataclass(kw_only=True)
class Ramp:
    """A value that changes over a stage.

    Args:
        end: where it ends; a number, or "x5" for five times what the configuration says.
        start: where it begins. Null: where it is when the stage begins.
        over: optimizer steps from start to end, after which it stays. Null: the length of the stage, or of what is left
            of the run for a last stage without a length.
        shape: `linear`, `cosine` (slow at both ends) or `geometric` (by an even factor; needs both above 0).
    """

    end: float | str
    start: float | str | None = None
    over: int | None = None
    shape: Literal["linear", "cosine", "geometric"] = "linear"

    def __post_init__(self) -> None:
        if self.over is not None and self.over < 1:
            raise UserError(f"a ramp over {self.over} steps; it takes at least 1, or null")
        if self.shape not in ("linear", "cosine", "geometric"):
            raise UserError(f"a ramp's shape is '{self.shape}'; it is linear, cosine or geometric")

    @property
    def still(self) -> bool:
        """Whether it is one value."""
        return self.start == self.end

    def at(self, start: float, end: float, done: float) -> float:
        """The value when the share `done` of the way, in [0, 1], is behind."""
        if done >= 1:
            return end
        if self.shape == "geometric" and start > 0 and end > 0:
            return float(start * (end / start) ** done)
        way = 0.5 * (1 - math.cos(math.pi * done)) if self.shape == "cosine" else done
        return start + (end - start) * way


@dataclass(kw_only=True)
class Until:
    """A condition on a validation metric that ends a stage; looked at after each validation.

    Args:
        monitor: the metric, for example val/rewards/accuracies.
        above, below: ends the stage when the metric is at least, or at most, this (up to rounding in float32, which
            metrics are logged in).
        plateau: ends it when the metric has not got better for this many validations in a row.
        mode: whether more (`max`) or less (`min`) is better; with plateau.
        min_delta: what counts as better; with plateau.
    """

    monitor: str
    above: float | None = None
    below: float | None = None
    plateau: int | None = None
    mode: Literal["max", "min"] = "max"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not self.monitor.startswith("val/"):
            raise UserError(f"until.monitor is '{self.monitor}'; a condition looks at a metric of validation, val/...")
        if sum(value is not None for value in (self.above, self.below, self.plateau)) != 1:
            raise UserError("until needs one of above, below and plateau")
        for name, value in (("above", self.above), ("below", self.below)):
            if value is not None and not math.isfinite(value):
                raise UserError(f"until.{name} is {value}; it is a finite number")
        if self.mode not in ("max", "min"):
            raise UserError(f"until.mode is '{self.mode}'; it is max or min")
        self.watch()

    def watch(self) -> Plateau:
        """A fresh memory for `met`."""
        return Plateau(patience=1 if self.plateau is None else self.plateau, min_delta=self.min_delta)

    def met(self, value: float, memory: Plateau) -> bool:
        if self.above is not None:
            return value >= self.above - ROUNDING * abs(self.above)
        if self.below is not None:
            return value <= self.below + ROUNDING * abs(self.below)
        return memory.update(value if self.mode == "max" else -value)


@dataclass(kw_only=True)
class StageConfig:
    """One stage. It ends with the first of the lengths given; the last stage needs none and lasts as long as the run.

    Args:
        steps: length in optimizer steps. epochs: in passes over the training data. until: a condition that ends it.
        values: name -> what it is in this stage: a number, "x5" for five times what the configuration says, or a ramp
            {start, end, over, shape}. Names are those of settings: beta, kl.coefficient, entropy.coefficient, optim.lr,
            ...; data.fraction is the share of the training rows in use. What a stage does not name stays.
        mix: stratum or source of the data -> its share, the same way.
    """

    steps: int | None = None
    epochs: float | None = None
    until: Until | None = None
    values: dict[str, float | Ramp | str] = field(default_factory=dict)
    mix: dict[str, float | Ramp | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.steps is not None and self.steps < 1) or (self.epochs is not None and not self.epochs > 0):
            raise UserError(f"a stage of {self.steps} steps and {self.epochs} epochs; a length is above 0, or null")
        given: Any = self.until
        if isinstance(given, Mapping):
            self.until = made(Until, given, "until")

    @property
    def endless(self) -> bool:
        return self.steps is None and self.epochs is None and self.until is None

    def ramps(self) -> dict[str, Ramp]:
        """Name -> ramp of everything this stage sets; a plain value is a ramp that stands still."""
        named = {**self.values, **{MIX + name: value for name, value in self.mix.items()}}
        return {name: _ramp(name, value) for name, value in named.items()}


def _ramp(name: str, value: Any) -> Ramp:
    if isinstance(value, Ramp):
        return value
    if isinstance(value, Mapping):
        return made(Ramp, value, name)
    return Ramp(start=value, end=value)


def made(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A configuration from a mapping of its fields. Raises UserError for one that does not exist or is missing."""
    known = fields(cast(Any, kind))
    names = ", ".join(f.name for f in known)
    if unknown := sorted(set(values) - {f.name for f in known}):
        raise UserError(f"{where} has no field {', '.join(unknown)}; it has {names}")
    if lacking := [f.name for f in known if f.default is f.default_factory is MISSING and f.name not in values]:
        raise UserError(f"{where} lacks {', '.join(lacking)}; it has {names}")
    return kind(**values)


def amount(value: Any, configured: float, name: str) -> float:
    """A number as it was given, or as a multiple of the configured one. Raises UserError for what is neither."""
    found = re.fullmatch(r"x\s*([0-9.eE+-]+)", value) if isinstance(value, str) else None
    try:
        return float(found[1]) * configured if found else float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError) as error:
        what = "a number, or for example x5: five times the configured one"
        raise UserError(f"{name} is {value!r}; it is {what}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run is: optimizer steps and batches since its beginning."""

    step: int
    batches: int


@dataclass(slots=True, kw_only=True)
class Walk:
    """Where a run is in its stages. All of it is state.

    Args:
        stage: number of the stage under way. begun: where it began. values: name -> base when it began.
        met: whether its condition has been met. memory: of that condition.
    """

    stage: int
    begun: Position
    values: dict[str, float] = field(default_factory=dict)
    met: bool = False
    memory: Plateau = field(default_factory=Plateau)

    def over(self, config: StageConfig, now: Position, batches_per_epoch: float) -> bool:
        """Whether the stage has reached one of its ends."""
        return self.met or self.done(config, now, batches_per_epoch) >= 1

    def done(self, config: StageConfig, now: Position, batches_per_epoch: float) -> float:
        """The share of the stage that is behind by its lengths; 0 without any."""
        shares = [0.0]
        if config.steps is not None:
            shares.append((now.step - self.begun.step) / config.steps)
        if config.epochs is not None:
            shares.append((now.batches - self.begun.batches) / (config.epochs * batches_per_epoch))
        return max(shares)

    def next_begun(self, config: StageConfig, now: Position) -> Position:
        """Where the next stage begins: where this one's steps end, also when several were taken at once."""
        if self.met or config.steps is None or now.step - self.begun.step < config.steps:
            return now
        return Position(step=self.begun.step + config.steps, batches=now.batches)

    def state_dict(self, name: str) -> dict[str, Any]:
        return {
            "stage": name,
            "step": self.begun.step,
            "batches": self.begun.batches,
            "values": dict(self.values),
            "met": self.met,
            "memory": self.memory.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], names: list[str]) -> Walk:
        """Inverse of `state_dict`; what the memory is a memory for comes from the configuration."""
        if state["stage"] not in names:
            raise UserError(
                f"the checkpoint stands in stage '{state['stage']}', and there are {', '.join(names)}; keep its name"
            )
        memory = Plateau()
        memory.load_state_dict(state["memory"])
        begun = Position(step=int(state["step"]), batches=int(state["batches"]))
        values = {name: float(value) for name, value in state["values"].items()}
        return cls(stage=names.index(state["stage"]), begun=begun, values=values, met=bool(state["met"]), memory=memory)
