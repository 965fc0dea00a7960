"""What a loss of preference pairs may look at, and the register of such losses by name.

A loss is a function with its paper's defaults: of beta, of label smoothing and of its settings, in its signature.

The losses themselves: `alignment.losses` (DPO and its closest relatives), `alignment.preference_losses` (the rest of
the family), `alignment.batch_losses` (those that look at the whole batch). P pairs, as in `alignment.batches`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from alignment.named import is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogRatios:
    """What a preference loss may look at.

    Args:
        chosen, rejected: [P] sum over scored tokens of log pi(token) - log pi_ref(token), in nats; without a reference
            (`modules.SimPO`, ...) of log pi(token).
        chosen_tokens, rejected_tokens: [P] scored tokens of each completion, at least 1.
        margin: [P] sum over other objectives of weight times (reward of the chosen - reward of the rejected), for
            losses that have any. share: the weight that they leave to what the preferences are about.
        reference_delta: [P] log pi_ref of the chosen minus that of the rejected completion, summed as `chosen` is.
        chosen_nll: [P] negative log-likelihood of the chosen completion under the policy, summed over scored tokens.
        whole: name -> [P], what a loss's `whole` found out about the whole batch, without gradient.

    The last three are None or empty where whoever made the pairs does not know them.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    margin: Tensor | None = None
    share: float = 1.0
    reference_delta: Tensor | None = None
    chosen_nll: Tensor | None = None
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def delta(self) -> Tensor:
        """[P] log-ratio of the chosen minus that of the rejected completion."""
        return self.chosen - self.rejected

    @property
    def mean_delta(self) -> Tensor:
        """[P] the same with each log-ratio divided by its completion's number of scored tokens."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens

    def tensors(self) -> dict[str, Tensor]:
        """The [P] fields that are there, by name, without gradient."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}

    def detached(self) -> PairLogRatios:
        """The same without gradient."""
        changed: dict[str, Any] = self.tensors()
        return replace(self, **changed)


PairLossFn = Callable[..., Tensor]
"""fn(pairs, beta, label_smoothing, *, settings) -> [P]; its settings are keyword-only. beta is one number for all
pairs, or [P]. What has a default in the signature may be left out of a configuration: it is the paper's."""

BETA, SMOOTHING = 0.1, 0.0
"""Of losses without a default of their own: those of DPO's paper."""

WholeFn = Callable[[PairLogRatios, Tensor, float | Tensor, dict[str, float], bool], Mapping[str, Tensor]]
"""fn(pairs of the whole batch over all ranks, their weights [P], beta, memory, learn) -> name -> [P].

What a loss must know of all pairs before it can judge one: it comes back as `PairLogRatios.whole`. Names are unique
over losses. `memory` is saved in the checkpoint and may be changed when `learn` says that the batch is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss:
    """A registered loss.

    Args:
        fn: see `PairLossFn`; label_smoothing is in [0, max_smoothing).
        margins: it needs `PairLogRatios.margin`.
        differences: it looks at log-ratios only through the difference of chosen and rejected, in which what an
            f-divergence leaves unknown cancels.
        whole: see `WholeFn`. masks_only: that needs token counts and weights, not log-probs.
        weighable: its value at a pair can be weighed by what the policy thinks of this pair (WPO).
        reference: it compares with a reference; False: its `chosen` and `rejected` are log-probs of the policy.
        positive: names of settings that it divides by.
    """

    fn: PairLossFn
    max_smoothing: float = 0.0
    margins: bool = False
    differences: bool = False
    whole: WholeFn | None = None
    masks_only: bool = False
    weighable: bool = True
    reference: bool = True
    positive: tuple[str, ...] = ()

    @property
    def beta(self) -> float | None:
        """Its own default. None: it has none."""
        return self._default(1)

    @property
    def smoothing(self) -> float | None:
        """Its own default of label smoothing. None: it has none, or no use for label smoothing."""
        return self._default(2) if self.max_smoothing > 0 else None

    def _default(self, place: int) -> float | None:
        """Of the parameter at this place of the function."""
        parameters = inspect.signature(self.fn).parameters.values()
        found = [p.default for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return float(found[place]) if place < len(found) and is_number(found[place]) else None


DPO_LOSSES: dict[str, DPOLoss] = {}


def dpo_loss(
    name: str,
    *,
    max_smoothing: float = 0.0,
    margins: bool = False,
    differences: bool = False,
    whole: WholeFn | None = None,
    masks_only: bool = False,
    weighable: bool = True,
    reference: bool = True,
    positive: tuple[str, ...] = (),
) -> Callable[[PairLossFn], PairLossFn]:
    """Register a preference loss; see `DPOLoss`. `max_smoothing` 0 means that it has no use for label smoothing."""

    def register(fn: PairLossFn) -> PairLossFn:
        if name in DPO_LOSSES:
            raise ValueError(f"a preference loss called {name!r} exists already")
        DPO_LOSSES[name] = DPOLoss(
            fn=fn,
            max_smoothing=max_smoothing,
            margins=margins,
            differences=differences,
            whole=whole,
            masks_only=masks_only,
            weighable=weighable,
            reference=reference,
            positive=positive,
        )
        return fn

    return register


def smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """[P] -(1 - e) log sigmoid(x) - e log sigmoid(-x)."""
    loss = -F.logsigmoid(logits)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * F.logsigmoid(-logits)
