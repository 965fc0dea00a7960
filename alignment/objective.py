"""The policy's loss on sampled completions as modules use it: a named loss with settings, reduction and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from alignment import policy_losses
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.losses import weighted
from alignment.metrics import Metrics
from alignment.policy_losses import (
    POLICY_LOSSES,
    PolicyTokens,
    Reduction,
    form_of,
    ratio_metrics,
    reduce_tokens,
    token_weights,
)
from alignment.update import Counts

OLD_LOGPS = "old_logps"
"""Token tensor: log-probs under the policy that sampled, as the trainer computes them. Without it they are taken to be
those of the policy itself: the first and only update of a rollout."""
IMPORTANCE = "importance"
"""Token tensor: weight of a token that another engine than the trainer sampled."""
KEPT = "kept"
"""Token tensor: 1 where the policy term counts, 0 elsewhere (entropy.keep)."""


class PolicyObjective:
    """One of `alignment.policy_losses`, or a user's own.

    Attributes:
        proportional: whether a token without an advantage is known to have no loss and no gradient.

    Args:
        loss: name, or import path of `fn(tokens: PolicyTokens, *, settings) -> [C]`.
        settings: keyword arguments of that function.
        reduction: of the token losses. None: that of the loss's paper (token_mean for a user's own).
        max_length: most tokens of a completion, for the reduction `const`.

    Raises UserError for a name, a setting or a reduction that does not exist.
    """

    def __init__(
        self, loss: str, settings: Mapping[str, Any] | None, reduction: Reduction | None, max_length: int
    ) -> None:
        self._fn = POLICY_LOSSES.get(loss, settings)
        # A loss of ours is; nothing is known of a user's own, registered or not.
        self.proportional = POLICY_LOSSES.find(loss).__module__ == policy_losses.__name__
        self._form = form_of(loss)
        self.reduction: Reduction = reduction or self._form.reduction
        if self.reduction not in get_args(Reduction):
            raise UserError(f"reduction '{self.reduction}' is not known; use {', '.join(get_args(Reduction))}")
        self._max_length = max_length
        defaults = {p.name: p.default for p in inspect.signature(self._fn).parameters.values()}
        # The bounds that the clip metrics count against; losses without a clip are counted against PPO's.
        low, high = defaults.get("low"), defaults.get("high")
        self._low = low if isinstance(low, int | float) else 0.2
        self._high = high if isinstance(high, int | float) else None

    def __call__(
        self, micro: GroupBatch, logps: Tensor, advantages: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """(this micro-batch's share of the loss; clip metrics, and `loss/policy_avg`: the mean loss of a token).

        Args:
            micro: may hold the token tensors `OLD_LOGPS`, `IMPORTANCE` and `KEPT`.
            logps: [C] with gradient. advantages: [C]. counts: of the whole batch.
        """
        tokens = PolicyTokens.of(micro, logps, micro.tokens.get(OLD_LOGPS, logps.detach()), advantages)
        values = self._fn(tokens)
        if values.shape != logps.shape:
            raise ValueError(
                f"the policy loss returned {tuple(values.shape)} for {len(logps)} tokens; it must return one value per "
                "token"
            )
        if logps.requires_grad and not values.requires_grad:
            raise ValueError("the policy loss has no gradient: it must be computed from `tokens.logps`, not detached")
        for name in (IMPORTANCE, KEPT):
            if name in micro.tokens:
                values = values * torch.where(micro.scored, micro.tokens[name], 0.0)
        weights, _ = token_weights(micro, counts, self.reduction, self._max_length)
        metrics = ratio_metrics(tokens, weights, level=self._form.level, low=self._low, high=self._high)
        metrics["loss/policy_avg"] = weighted(values, weights)
        return self.reduce(values, micro, counts), metrics

    def reduce(self, values: Tensor, micro: GroupBatch, counts: Counts) -> Tensor:
        """[C] -> this micro-batch's share, under this objective's reduction."""
        return reduce_tokens(values, micro, counts, self.reduction, self._max_length)
