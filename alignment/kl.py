"""Divergence of the policy from a reference, per token: estimators from the sampled token's log-probs.

With d = log pi_ref - log pi at a token sampled from pi, and r = pi / pi_old:

name    value                 expectation                     expected gradient in a loss, on-policy
k1      -d                    KL(pi||ref)                     0: for rewards, useless as a loss
k2      d^2 / 2               biased                          that of KL(pi||ref)
k3      e^d - d - 1           KL(pi||ref)                     that of KL(ref||pi), the forward KL
k3_is   r (e^d - d - 1)       KL(pi||ref)                     that of KL(pi||ref): r is differentiated too
sym     d (e^d - 1) / 2       [KL(pi||ref) + KL(ref||pi)]/2   -

Schulman 2020, "Approximating KL divergence"; k3_is as in DeepSeek-V3.2. A KL is *added* to a loss and *subtracted* from
a reward. Exact forms over the whole vocabulary are in `alignment.full_kl`.

To add one, write `fn(d, ratio) -> [C]` and name it by its import path, or register it in `KL_ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alignment.bounded import bounded_exp
from alignment.losses import weighted
from alignment.named import Registry

Estimator = Callable[..., Tensor]
"""fn(d [C], ratio [C], *, settings) -> [C] nats. `d` carries the policy's gradient, and so does `ratio`."""

KL_ESTIMATORS: Registry[Estimator] = Registry("KL estimator")


@KL_ESTIMATORS.register("k1")
def k1(d: Tensor, ratio: Tensor) -> Tensor:
    """-d."""
    return -d


@KL_ESTIMATORS.register("k2")
def k2(d: Tensor, ratio: Tensor) -> Tensor:
    """d^2 / 2."""
    return d * d / 2


@KL_ESTIMATORS.register("k3")
def k3(d: Tensor, ratio: Tensor) -> Tensor:
    """e^d - d - 1, never negative."""
    return bounded_exp(d) - d - 1


@KL_ESTIMATORS.register("k3_is")
def k3_is(d: Tensor, ratio: Tensor) -> Tensor:
    """k3 weighted by the importance ratio, which is differentiated too.

    The gradient with respect to log pi is r (k3 - (e^d - 1)) = -r d: the exponentials cancel. It is given as that,
    since beyond the bound the straight line would not cancel, and its gradient would point the wrong way.
    """
    slope = (ratio * d).detach() * d
    return (ratio * k3(d, ratio)).detach() + (slope - slope.detach())


@KL_ESTIMATORS.register("sym")
def sym(d: Tensor, ratio: Tensor) -> Tensor:
    """d (e^d - 1) / 2, never negative: half of Jeffreys' divergence in expectation."""
    return d * (bounded_exp(d) - 1) / 2


def token_kl(
    estimator: Estimator, logps: Tensor, ref_logps: Tensor, scored: Tensor, old_logps: Tensor | None = None
) -> Tensor:
    """[C] nats, 0 at unscored tokens whatever stands there (NaN included).

    Args:
        logps: [C] under the policy. ref_logps: [C] under the reference. old_logps: [C] under the policy that sampled;
            None: the policy itself, so that the ratio is 1 and carries the gradient.
    """
    zero = torch.zeros_like(logps)
    new = torch.where(scored, logps, zero)
    d = torch.where(scored, ref_logps.detach(), zero) - new
    old = new if old_logps is None else torch.where(scored, old_logps, zero)
    return torch.where(scored, estimator(d, bounded_exp(new - old.detach())), zero)


def kl_metric(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[C] nats, [C] weights -> (sum, count) for a metric. No token at all counts next to nothing instead of nothing: a
    window in which every completion was masked shows 0, not NaN."""
    total, count = weighted(values, weights)
    return total, count.clamp(min=1e-12)
