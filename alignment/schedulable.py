"""Values that change while a run trains, and who changes them.

    value = base x product of factors + sum of additions

    base         what the configuration says, or what its one writer says instead (callbacks.Stages, an adaptive KL)
    factors      one for each cause (a plateau, the gaps of a batch, a stalled head)
    additions    one for each cause, for values that may be 0, which no factor moves

A cause replaces its own last factor and nobody else's, so callbacks that move the same value never overwrite each
other, whatever their order. Values have the names of their settings: `beta`, `kl.coefficient`, `optim.lr`.

The state is in the checkpoint. A setting given anew on a resume is the base and nothing else stays of what moved it; a
factor whose callback is not in the resumed run goes when training starts, and is told.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

from alignment.errors import UserError

log = logging.getLogger(__name__)

LR = "optim.lr"
"""Name of the peak learning rate."""

ABOVE_ZERO = ("beta", LR)
"""Names of values that something is divided by."""


class Schedulable:
    """One value.

    Args:
        name: of its setting. configured: what the configuration says. Only numbers can be scaled; other values are
            kept and saved.
        apply: called with the value whenever it may have changed, for values that are not read where they are used.
        follow: what gives the base in place of `configured`: a controller. writer: its name, which is then the writer.
        blocked: why nothing may move it, as the end of a sentence; empty where something may.
    """

    def __init__(
        self,
        name: str,
        configured: Any,
        *,
        apply: Callable[[float], None] | None = None,
        follow: Callable[[], float] | None = None,
        writer: str | None = None,
        blocked: str = "",
    ) -> None:
        assert (follow is None) == (writer is None), "a controller has a name"
        self.name, self.configured, self.blocked = name, configured, blocked
        self.writer = writer
        self._apply, self._follow = apply, follow
        self._base = configured
        self._factors: dict[str, float] = {}
        self._additions: dict[str, float] = {}
        self._claimed: set[str] = set()

    # ------------------------------------------------------------------ reading

    @property
    def base(self) -> Any:
        return self._base if self._follow is None else self._follow()

    @property
    def value(self) -> Any:
        """What is in force."""
        return self._under(self._factors)

    @property
    def moved(self) -> bool:
        """Whether something in this run may change it, beside its own controller."""
        return bool(self._claimed) or (self.writer is not None and self._follow is None)

    def factor(self, cause: str) -> float:
        return self._factors.get(cause, 1.0)

    def without(self, cause: str) -> float:
        """The value if this cause had no factor."""
        return float(self._under(self._factors.keys() - {cause}))

    def _under(self, causes: Collection[str]) -> Any:
        """The value under the factors of these causes alone."""
        value = self.base
        if causes:  # in one order, whichever came first: products of floats depend on it
            value = value * math.prod(self._factors[cause] for cause in sorted(causes))
        if self._additions:
            value = value + math.fsum(self._additions.values())
        return value

    # ------------------------------------------------------------------ moving

    def own(self, writer: str) -> None:
        """Become the writer of the base. Raises UserError where there is one, or where nothing may move the value."""
        self._check_free()
        if self.writer not in (None, writer):
            raise UserError(f"{writer} and {self.writer} would both set {self.name}; leave one of them out")
        self.writer = writer

    def write(self, value: Any, writer: str | None = None) -> None:
        """Another base, by its writer. None: by a plain assignment, where there is no writer."""
        if self.writer != writer:
            assert writer is None, f"{writer} writes {self.name} without owning it"
            raise UserError(f"{self.name} is set by {self.writer}; nothing else may assign it")
        self._base = value
        self.apply()

    def claim(self, cause: str) -> None:
        """Say in a callback's `setup` that this cause may have a factor or an addition in this run: what a checkpoint
        holds of it stays. Raises UserError where nothing may move the value."""
        self._check_free()
        self._claimed.add(cause)

    def scale(self, cause: str, factor: float) -> None:
        """The factor of a cause, in place of its last one; finite and at least 0."""
        assert 0 <= factor < math.inf, f"{self.name} times {factor}"
        self._claimed.add(cause)
        self._factors[cause] = factor
        self.apply()

    def unscale(self, cause: str) -> None:
        """Take a cause's factor away."""
        if self._factors.pop(cause, None) is not None:
            self.apply()

    def add(self, cause: str, amount: float) -> None:
        """The addition of a cause, in place of its last one."""
        assert math.isfinite(amount), f"{self.name} plus {amount}"
        self._claimed.add(cause)
        self._additions[cause] = amount
        self.apply()

    def apply(self) -> None:
        if self._apply is not None:
            self._apply(self.value)

    def check(self, value: float, where: str) -> None:
        """Raise UserError for a base that is none."""
        if not (0 < value < math.inf or (value == 0 and self.name not in ABOVE_ZERO)):
            low = "above 0" if self.name in ABOVE_ZERO else "at least 0"
            raise UserError(f"{where}: {self.name} is {value}; it must be {low}, and finite")

    def _check_free(self) -> None:
        if self.blocked:
            raise UserError(f"{self.name} cannot be moved: {self.blocked}")

    # ------------------------------------------------------------------ state

    def settle(self) -> None:
        """At the start of training: what nobody in this run stands for goes, and what is in force is applied."""
        for kind, sign in ((self._factors, "x"), (self._additions, "+")):
            for cause in sorted(kind.keys() - self._claimed):
                said = f"{sign} {kind.pop(cause):.4g} of '{cause}'"
                log.warning("%s: the %s goes; this run has no such callback", self.name, said)
        if self.moved or self.base != self.configured:
            self.apply()

    def state_dict(self) -> dict[str, Any]:
        return {
            "configured": self.configured,
            "now": self._base,
            "factors": dict(self._factors),
            "additions": dict(self._additions),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`, unless the setting was given anew: then that is the value, and it is told."""
        if state["configured"] != self.configured:
            log.warning("%s stays at %s as given; the checkpoint had %s", self.name, self.configured, state["now"])
            return
        self._base = state["now"]
        self._factors, self._additions = dict(state["factors"]), dict(state["additions"])


class Schedulables:
    """The values of one module or data module, by name."""

    def __init__(self) -> None:
        self._known: dict[str, Schedulable] = {}

    def register(self, schedulable: Schedulable) -> Schedulable:
        assert schedulable.name not in self._known, f"{schedulable.name} is there already"
        self._known[schedulable.name] = schedulable
        return schedulable

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __getitem__(self, name: str) -> Schedulable:
        return self._known[name]

    def find(self, name: str, where: str) -> Schedulable:
        """The value of this name. Raises UserError, which begins with `where`, when there is none."""
        if name not in self._known:
            close = difflib.get_close_matches(name, self._known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"{where}: there is no value '{name}' to move here; there are {', '.join(self)}{hint}")
        return self._known[name]

    def in_force(self) -> dict[str, float]:
        """Name -> value of those that something in this run may move: what the log shows."""
        return {name: float(one.value) for name, one in self._known.items() if one.moved}

    def settle(self) -> None:
        """Of all of them; see Schedulable.settle."""
        for one in self._known.values():
            one.settle()

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._known.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Values that this run does not have are left out."""
        for name, saved in state.items():
            if name in self._known:
                self._known[name].load_state_dict(saved)


@runtime_checkable
class HasSchedulables(Protocol):
    """A module whose values callbacks may move: `alignment.training.TrainingMixin`.

    Attributes:
        schedulables: the values. batches_seen: batches trained on so far. updates_per_batch: optimizer steps of each.
    """

    schedulables: Schedulables
    batches_seen: int
    updates_per_batch: int

    def note_values(self, values: Mapping[str, float]) -> None:
        """Metrics of the update or batch under way, the same on every rank."""


class Moved:
    """An attribute that reads the value in force of a registered name. The first assignment is its configured value; a
    later one is another base."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        known: Schedulables = module.schedulables
        if self.name not in known:
            raise AttributeError(f"{type(module).__name__} has not set {self.name} yet")
        return known[self.name].value

    def __set__(self, module: Any, value: Any) -> None:
        known: Schedulables = module.schedulables
        if self.name in known:
            known[self.name].write(value)
        else:
            known.register(Schedulable(self.name, value))


def of(holder: object, attribute: str) -> Callable[[], float]:
    """What reads an attribute; unlike a lambda it goes to another process."""
    return partial(getattr, holder, attribute)
