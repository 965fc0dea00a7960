"""Which stratum a prompt belongs to, from what its row says or from its length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from alignment.errors import UserError
from alignment.prompting import DIFFICULTY
from datamodules.grading import Regrading
from datamodules.rows import RowError, number
from datamodules.store import GroupStore
from datamodules.strata import Exhausted


@dataclass(kw_only=True)
class StrataConfig:
    """How prompts are sorted by difficulty and mixed.

    Args:
        by: what tells the difficulty: a data "column", a generator's "level" (the column of that name), the "length" of
            the prompt in tokens, or what is "measured": then all prompts begin in the middle, and `regrade_every` is
            needed.
        column: the column of by: column. It holds names of strata, or numbers of which larger ones are harder.
        bounds: the largest number of each stratum but the last. Null: strata of equal size.
        ratio: the mix of every batch, by stratum, easiest first.
        order: "mix" gives every batch the ratio; "curriculum" goes from easy to hard in every epoch; "shuffle" takes
            prompts as they come and only labels them.
        exhausted: what happens when a stratum is used up: "reshuffle" it, or "stop" the epoch.
        regrade_every: batches after which prompts are graded anew by their measured success. Null: never.
        rollouts: completions that a prompt needs to be graded.
        rates: success rates that part the strata, falling.
        margin: how far a success rate must be beyond one of them to move a prompt.
    """

    by: Literal["column", "level", "length", "measured"] = "column"
    column: str = DIFFICULTY
    bounds: list[float] | None = None
    ratio: dict[str, float] = field(default_factory=lambda: {"easy": 7, "medium": 2, "hard": 1})
    order: Literal["mix", "curriculum", "shuffle"] = "mix"
    exhausted: Exhausted = "reshuffle"
    regrade_every: int | None = None
    rollouts: int = 8
    rates: list[float] = field(default_factory=lambda: [0.7, 0.3])
    margin: float = 0.05

    def __post_init__(self) -> None:
        if self.by not in ("column", "level", "length", "measured"):
            raise UserError(f"strata.by is '{self.by}'; use column, level, length or measured")
        if self.order not in ("mix", "curriculum", "shuffle"):
            raise UserError(f"strata.order is '{self.order}'; use mix, curriculum or shuffle")
        if self.by == "measured" and self.regrade_every is None:
            raise UserError("strata.by: measured needs strata.regrade_every, in batches")
        if self.regrade_every is not None and self.order == "curriculum":
            raise UserError("strata.order: curriculum needs a difficulty that stays; leave regrade_every out")
        for name, values in (("bounds", self.bounds), ("rates", self.rates if self.regrade_every else None)):
            if values is not None and len(values) != len(self.ratio) - 1:
                raise UserError(f"strata.{name} has {len(values)} numbers for {len(self.ratio)} strata; give one fewer")
        if self.bounds is not None and sorted(self.bounds) != self.bounds:
            raise UserError(f"strata.bounds must rise, got {self.bounds}")

    @property
    def names(self) -> list[str]:
        """The strata, easiest first."""
        return list(self.ratio)

    @property
    def source(self) -> str | None:
        """The data column the difficulty is read from; None when it is not."""
        return {"column": self.column, "level": "level"}.get(self.by)

    @property
    def regrading(self) -> Regrading | None:
        if self.regrade_every is None:
            return None
        return Regrading(every=self.regrade_every, rollouts=self.rollouts, rates=self.rates, margin=self.margin)


class Labeller:
    """Labels the groups of any split by what the training groups are like.

    Args:
        config: the rule.
        train: the training groups, which decide the bounds where none are given.
    """

    def __init__(self, config: StrataConfig, train: GroupStore) -> None:
        self._config = config
        self._places = {name.casefold(): k for k, name in enumerate(config.names)}
        self._bounds = config.bounds
        reads_column = config.source is not None and config.bounds is None
        self._by_name = reads_column and any(self._is_name(value) for value in self._column(train))
        if self._bounds is None and not self._by_name and config.by != "measured":
            self._bounds = _equal_parts(self._numbers(train), len(config.names))

    def labels(self, store: GroupStore) -> np.ndarray:
        """[P] int64 stratum of each group, 0 the easiest. Raises UserError for a value that is none."""
        if self._config.by == "measured":
            return np.full(len(store), len(self._places) // 2, dtype=np.int64)
        if self._by_name:
            return np.array(self._each(store, self._named), dtype=np.int64)
        return np.searchsorted(np.asarray(self._bounds), self._numbers(store), side="left").astype(np.int64)

    def _numbers(self, store: GroupStore) -> np.ndarray:
        """[P] difficulties, larger ones harder."""
        if self._config.by == "length":
            return store.tokens()
        return np.array(self._each(store, lambda value: number(value, "difficulty")), dtype=np.float64)

    def _is_name(self, value: Any) -> bool:
        return isinstance(value, str) and value.casefold() in self._places

    def _named(self, value: Any) -> int:
        if not self._is_name(value):
            raise RowError("difficulty is no stratum")
        return self._places[value.casefold()]

    def _column(self, store: GroupStore) -> list[Any]:
        name = self._config.source
        assert name is not None, "only a data column has values to read"
        return [columns[name] for columns in store.columns()]

    def _each(self, store: GroupStore, read: Callable[[Any], float]) -> list[float]:
        out = []
        for value, index in zip(self._column(store), store.row_index, strict=True):
            try:
                out.append(read(value))
            except RowError as error:
                raise UserError(
                    f"row {index + 1}: column '{self._config.source}' holds {value!r}; a difficulty is a number, or in "
                    f"every row one of {', '.join(self._config.names)}"
                ) from error
        return out


def _equal_parts(values: np.ndarray, parts: int) -> list[float]:
    """Upper bounds of all parts but the last, so that each holds as equal a share as equal values allow."""
    ordered = np.sort(values)
    return [float(ordered[-(-len(ordered) * k // parts) - 1]) for k in range(1, parts)] if len(ordered) else []
