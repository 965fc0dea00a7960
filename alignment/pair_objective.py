"""The preference loss as modules use it: one named loss or a weighted mix of several, its settings and its
divergence."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from alignment.divergences import Divergence, check_divergence, under
from alignment.errors import UserError
from alignment.losses import check_margins
from alignment.named import imported, is_number
from alignment.pair_losses import BETA, DPO_LOSSES, SMOOTHING, DPOLoss, PairLogRatios

MIX = "a mix is a mapping, loss -> weight, for example {sigmoid: 0.8, bco_pair: 0.2, sft: 1.0}"


class PairObjective:
    """A loss of pairs, as `fn(pairs, beta, label_smoothing) -> [P]`.

    Attributes:
        weights: loss -> weight in the sum; one loss has weight 1.
        beta, label_smoothing: what training begins with. own: those of them that nobody gave.

    Args:
        loss: name or import path of a loss, or a mix: name -> weight.
        settings: keyword arguments of the losses; each goes to those of the mix that have it.
        beta, label_smoothing: None: the loss's own, in a mix that of its first loss that has one, else BETA and
            SMOOTHING. In a mix label smoothing reaches the losses that know it.
        margins: data column -> weight, see `alignment.losses.check_margins`.
        divergence, alpha: see `alignment.divergences`.
        weighted: pairs will be weighed by what the policy thinks of them (WPO).
        reference: whether there is a reference.

    Raises UserError for what does not exist or does not go together.
    """

    def __init__(
        self,
        loss: str | Mapping[str, float],
        settings: Mapping[str, Any] | None = None,
        *,
        beta: float | None = None,
        label_smoothing: float | None = None,
        margins: Mapping[str, float] | None = None,
        divergence: Divergence = "reverse_kl",
        alpha: float = 0.5,
        weighted: bool = False,
        reference: bool = True,
    ) -> None:
        self.weights = {loss: 1.0} if isinstance(loss, str) else check_mix(loss)
        self._losses = {name: find(name) for name in self.weights}
        self._divergence, self._alpha = divergence, alpha
        self.beta = self._first("beta", BETA) if beta is None else beta
        self.label_smoothing = self._first("smoothing", SMOOTHING) if label_smoothing is None else label_smoothing
        self.own = {"beta": self.beta} if beta is None else {}
        self.own |= {"label_smoothing": self.label_smoothing} if label_smoothing is None else {}
        if not 0 < self.beta < math.inf:
            raise UserError(f"beta is {self.beta}; it must be positive, and finite")
        self._check_smoothing(self.label_smoothing)
        marginal = [name for name, entry in self._losses.items() if entry.margins]
        check_margins(next(iter(marginal or self.weights)), margins or {})
        check_divergence(divergence, alpha)
        for name, entry in self._losses.items():
            if divergence != "reverse_kl" and not entry.differences:
                users = ", ".join(sorted(n for n, e in DPO_LOSSES.items() if e.differences))
                raise UserError(
                    f"preference loss '{name}' goes with reverse_kl, not with {divergence}; these do: {users}"
                )
            if reference and not entry.reference:
                raise UserError(f"preference loss '{name}' has no reference; use modules.SimPO or modules.ORPO")
        if weighted:
            self._check_weighable()
        self._fns = self._with_settings(dict(settings or {}))

    def _first(self, what: Literal["beta", "smoothing"], otherwise: float) -> float:
        """The default of the first loss that has one of its own."""
        found = [getattr(entry, what) for entry in self._losses.values()]
        return next((float(value) for value in found if value is not None), otherwise)

    def _check_weighable(self) -> None:
        if self.matched:
            raise UserError(
                "weighting wpo does not go with aot and aot_unpaired: sorted pairs have no weight of their own"
            )
        if not any(entry.weighable for entry in self._losses.values()):
            raise UserError(f"weighting wpo does not go with {', '.join(self.weights)} alone: it compares no pairs")

    def _check_smoothing(self, smoothing: float) -> None:
        if not smoothing:
            return
        users = [entry.max_smoothing for entry in self._losses.values() if entry.max_smoothing > 0]
        if not users:
            known = ", ".join(sorted(n for n, entry in DPO_LOSSES.items() if entry.max_smoothing > 0))
            named = ", ".join(map(repr, self.weights))
            raise UserError(f"preference loss {named} does not use label_smoothing ({smoothing}); these do: {known}")
        if not 0 <= smoothing < min(users):
            raise UserError(f"{next(iter(self.weights))!r} needs 0 <= label_smoothing < {min(users)}, got {smoothing}")

    def _with_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        fns: dict[str, Any] = {}
        taken: set[str] = set()
        for name, entry in self._losses.items():
            parameters = inspect.signature(entry.fn).parameters.values()
            known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
            mine = {key: value for key, value in given.items() if key in known}
            for key, value in mine.items():
                if is_number(known[key]) and not is_number(value):
                    raise UserError(f"preference loss '{name}' has {key} {value!r}; it is a number")
                if key in entry.positive and not value > 0:
                    raise UserError(f"preference loss '{name}' has {key} {value}; it must be above 0")
            taken |= mine.keys()
            fns[name] = functools.partial(entry.fn, **mine) if mine else entry.fn
        if unknown := sorted(given.keys() - taken):
            raise UserError(
                f"preference loss {', '.join(self.weights)} has no setting {', '.join(unknown)} (loss_args)"
            )
        return fns

    # ------------------------------------------------------------------ values

    def __call__(self, pairs: PairLogRatios, beta: float | Tensor, label_smoothing: float) -> Tensor:
        """[P] the weighted sum."""
        return self.total(self.terms(pairs, beta, label_smoothing))

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """[P] the weighted sum of `terms`."""
        return torch.stack([self.weights[name] * term for name, term in terms.items()]).sum(dim=0)

    def terms(self, pairs: PairLogRatios, beta: float | Tensor, label_smoothing: float) -> dict[str, Tensor]:
        """Name -> [P], each before its weight. Raises ValueError for a loss of the user's own with another shape."""
        scored = under(pairs, self._divergence, self._alpha)
        found = {}
        for name, fn in self._fns.items():
            smoothing = label_smoothing if self._losses[name].max_smoothing > 0 else 0.0
            found[name] = fn(scored, beta, smoothing)
            if found[name].shape != pairs.chosen.shape:
                raise ValueError(
                    f"preference loss '{name}' returned {tuple(found[name].shape)} for {len(pairs.chosen)} pairs; it "
                    "must return one value per pair"
                )
        return found

    def weighable(self, name: str) -> bool:
        """Whether this loss of the mix takes weights of pairs."""
        return self._losses[name].weighable

    # ------------------------------------------------------------------ the whole batch

    @property
    def matched(self) -> list[str]:
        """Names of the losses that compare values of different pairs, so that no pair has a value of its own."""
        return [name for name, entry in self._losses.items() if not entry.weighable and not entry.masks_only]

    @property
    def looks_around(self) -> bool:
        """Whether a pair's value depends on others of its batch."""
        return any(entry.whole is not None for entry in self._losses.values())

    @property
    def masks_suffice(self) -> bool:
        """Whether what it must know of the others needs no log-probs."""
        return all(entry.masks_only for entry in self._losses.values() if entry.whole is not None)

    def whole(
        self, pairs: PairLogRatios, weights: Tensor, beta: float | Tensor, memory: dict[str, float], learn: bool
    ) -> dict[str, Tensor]:
        """See `pair_losses.WholeFn`; the pairs are all of the batch, over all ranks, and have no gradient."""
        found: dict[str, Tensor] = {}
        for entry in self._losses.values():
            if entry.whole is not None:
                found |= entry.whole(pairs, weights, beta, memory, learn)
        return found


def find(name: str) -> DPOLoss:
    """The loss called `name`, or the one at the import path `name`, of which nothing is known."""
    if name in DPO_LOSSES:
        return DPO_LOSSES[name]
    if "." in name:
        return DPOLoss(fn=imported("preference loss", name), max_smoothing=0.5, differences=True)
    known = ", ".join(sorted(DPO_LOSSES))
    raise UserError(f"preference loss {name!r} is not known; available: {known}, or the import path of your own")


def check_mix(mix: Mapping[str, float]) -> dict[str, float]:
    """Raise UserError unless the mix has losses and positive weights."""
    if not isinstance(mix, Mapping) or not mix:
        raise UserError(f"loss is {mix!r}; it is the name of a preference loss, or {MIX}")
    for name, weight in mix.items():
        if not is_number(weight) or not 0 < weight < math.inf:
            raise UserError(f"loss has the weight {weight!r} for '{name}'; it must be above 0: {MIX}")
    return {name: float(weight) for name, weight in mix.items()}
