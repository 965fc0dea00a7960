"""Entropy deficit: how far the policy's token entropy lies below a floor.

    R_entropy = sum_t w_t relu(h*_t - h_t) / sum_t w_t,      h = H / log V in [0, 1]

floor       h*                             what it does
uniform     1                              always on: R is KL(pi || uniform) / log V, its gradient that of -H / log V
reference   rho h_ref of the same token    one-sided: exactly 0 at the start, then only where entropy has been lost
constant    a number                       one-sided, the same for every token

An entropy bonus written as -H is negative, which a bound in proportion to the loss (`alignment.component_clip`) cannot
live with; a deficit is at least 0. Towards the uniform distribution over a real vocabulary is rarely where a language
model should go, so `reference` is the default.

Legend: P pairs, N completions, C tokens, as in `alignment.batches`.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.update import group_weights

Floor = Literal["uniform", "reference", "constant"]
Scope = Literal["both", "chosen", "rejected"]

REF_ENTROPY = "ref_entropy"
"""Token tensor: entropy in nats under the reference."""

ROUNDING = 1e-5
"""A normalised entropy is known to about this much in fp32, whatever path computed it. A smaller deficit is none, so
that a policy that still is its reference has neither a deficit nor a gradient from one."""


def entropy_deficit(normalised: Tensor, floor: Tensor | float) -> Tensor:
    """[C] normalised entropies, [C] floors or one -> [C] relu(floor - entropy). The floor gets no gradient."""
    gap = (floor.detach() if isinstance(floor, Tensor) else floor) - normalised
    return torch.where(gap > ROUNDING, gap, torch.zeros_like(gap))


def floor_of(kind: Floor, value: float | None, batch: GroupBatch, vocabulary: int) -> Tensor | float:
    """The floor h* of each token [C], or one for all.

    Args:
        value: rho of `reference` (None: 1), the floor of `constant`.
        batch: with the token tensor `REF_ENTROPY` for `reference`.
    """
    if kind == "uniform":
        return 1.0
    if kind == "constant":
        assert value is not None, "checked by check_floor"
        return value
    return (1.0 if value is None else value) * batch.tokens[REF_ENTROPY] / math.log(vocabulary)


def check_floor(kind: Floor, value: float | None) -> None:
    """Raise UserError for an unknown floor or a value that does not go with it."""
    if kind not in get_args(Floor):
        raise UserError(f"entropy_floor is '{kind}'; it is one of {', '.join(get_args(Floor))}")
    if kind == "uniform" and value is not None:
        raise UserError(f"entropy_floor uniform is 1 and takes no entropy_level ({value}); use constant or reference")
    if kind == "constant" and value is None:
        raise UserError("entropy_floor constant needs entropy_level: the least entropy of a token over log V, 0 to 1")
    if value is not None and not 0 < value <= 1:
        raise UserError(f"entropy_level is {value}; it lies above 0 and at most at 1")


def check_scope(name: str, scope: Scope) -> None:
    if scope not in get_args(Scope):
        raise UserError(f"{name} is '{scope}'; it is one of {', '.join(get_args(Scope))}")


def row_scope(batch: GroupBatch, scope: Scope) -> Tensor:
    """[N] weight of each completion of these pairs: that of its pair, 0 outside the scope."""
    weights = group_weights(batch)[batch.group_of]
    if scope == "both":
        return weights
    chosen = torch.arange(len(weights), device=weights.device) % 2 == 0  # pairs are chosen, then rejected
    return torch.where(chosen if scope == "chosen" else ~chosen, weights, torch.zeros_like(weights))


def token_scope(batch: GroupBatch, scope: Scope) -> Tensor:
    """[C] weight of each token: that of its pair where it is scored and in the scope, else 0."""
    return row_scope(batch, scope)[batch.row_of()] * batch.scored
