"""Which part of a policy with heads each gradient reaches. One policy, several routes to it:

route    gradient reaches                                  meant for
0        the trunk and the LM head, through all of it      the combined advantage, or the rewards' under isolation
1        the fusion                                        the combined advantage
2 + k    head k, also through its fusion weight            the advantage of reward k alone

All routes have the same value, so the vocabulary is walked once, forwards and backwards: with B the gradient of a
token's log-prob with respect to its state, route i receives g_i B; g_i is the slope of its own loss in that log-prob.

Legend: n scored tokens, A active heads, R = 2 + A routes, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignment.full_kl import Head
from alignment.heads import Heads, mix, mixture
from alignment.lm_head import HeadSpec, LogitForm, cut_columns, forward_stats, logit_gradient, tile_logits, tiles

TILE_BYTES = 8 << 20

# Logits held at a time for the entropy of a mixture, over all heads (256 MiB in fp32).
_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A policy's tokens along all routes.

    Args:
        logps: [R, n] log-probs of the tokens. entropy: [n] of the policy; along all routes (none in a linear pool).
        states: [R, n, H] what the LM head reads; None in a linear pool, which has no such state.
        own: A states [n, H] of the sub-policies; the gradient of the k-th reaches head k alone.
        deviation: [A, n] how far they are from the trunk's state, relative to its length.
        alpha: [n, A] fusion weights, without gradient. evenness: [n] their entropy, whose gradient reaches the fusion.
    """

    logps: Tensor
    entropy: Tensor
    states: Tensor | None
    own: list[Tensor]
    deviation: Tensor
    alpha: Tensor
    evenness: Tensor


def together(routes: Tensor) -> Tensor:
    """[R, ...] -> [...]: the value of each, with gradient along all of them."""
    return routes[0] + (routes[1:] - routes[1:].detach()).sum(0)


def route(heads: Heads, h: Tensor, head: Head, targets: Tensor, *, temperature: float = 1.0) -> Routed:
    """The policy's log-probs of `targets` [n], from the trunk's states h [n, H] that predict them."""
    held = h.detach()
    through, live = heads.deltas(h, frozen=True), heads.deltas(held)
    still = [delta.detach() for delta in live]
    fusion = heads.log_alpha(heads.scores(held, still))
    scores = heads.scores(held, live, frozen=True)
    routes = [
        (h, through, heads.log_alpha(heads.scores(h, through, frozen=True))),
        (held, still, fusion),
    ]
    for k in range(len(live)):
        log_alpha = heads.log_alpha(_only(k, scores))
        routes.append((held, [live[j] if j == k else still[j] for j in range(len(live))], log_alpha))
    pool = _log_linear if heads.spec.pool == "log_linear" or len(live) == 1 else _linear
    logps, entropy, states = pool(routes, head, targets, temperature)
    return Routed(
        logps=logps,
        entropy=entropy,
        states=states,
        own=[held + delta for delta in live],
        deviation=torch.stack([delta.float().norm(dim=-1) for delta in still]) / held.float().norm(dim=-1),
        alpha=fusion.detach().exp(),
        evenness=-(fusion.exp() * fusion).sum(-1),
    )


_Route = tuple[Tensor, list[Tensor], Tensor]
"""States of the trunk [n, H], what each head adds [n, H], log fusion weights [n, A]; with the route's gradient."""


def _only(k: int, values: Tensor) -> Tensor:
    """[n, A] with the gradient of column k alone."""
    return torch.where(torch.arange(values.shape[-1], device=values.device) == k, values, values.detach())


def _log_linear(
    routes: list[_Route], head: Head, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    states = torch.stack([mix(h, deltas, log_alpha.exp()) for h, deltas, log_alpha in routes])
    logps, entropy = score_routes(states, head.weight, head.bias, targets, form=head.form, temperature=temperature)
    return logps, entropy, states


def _linear(
    routes: list[_Route], head: Head, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each sub-policy is scored by itself, along two routes: the trunk's and that of its head."""
    (h, through, _), (held, still, log_alpha), *_ = routes
    parts = []
    for k, delta in enumerate(through):
        states = torch.stack([h + delta, held + routes[2 + k][1][k]])
        parts.append(score_routes(states, head.weight, head.bias, targets, temperature=temperature)[0])
    trunk, own = torch.stack(parts, dim=-1)  # [n, A] each
    seen = [trunk, own.detach(), *(_only(k, own) for k in range(len(parts)))]
    fused = [torch.logsumexp(logps + route[2], dim=-1) for logps, route in zip(seen, routes, strict=True)]
    return torch.stack(fused), _mixture_entropy([held + d for d in still], log_alpha.detach(), head), None


@torch.no_grad()
def _mixture_entropy(states: list[Tensor], log_alpha: Tensor, head: Head) -> Tensor:
    """[n] nats."""
    size = max(1, _LOGITS // (len(states) * head.weight.shape[0]))
    blocks = zip(*(torch.split(part, size) for part in (*states, log_alpha)), strict=True)
    logps = (mixture(block[:-1], block[-1], head.weight, head.bias) for block in blocks)
    return torch.cat([-(values.exp() * values).sum(-1) for values in logps])


# ------------------------------------------------------------------------------------------------------------- LM head


def score_routes(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    form: LogitForm | None = None,
    temperature: float = 1.0,
    tile_bytes: int = TILE_BYTES,
) -> tuple[Tensor, Tensor]:
    """`lm_head.score_tokens` of states that are equal along R routes and differ in what their gradient reaches.

    Args:
        states: [R, n, H], of which the first row is read. weight: [V, H]. bias: [V] or None. targets: [n].

    Returns:
        log-probs [R, n] and entropies [n], in fp32 (float64 for float64 input). The log-probs of route i have a
        gradient with respect to states[i], the entropies with respect to all of them. Weight and bias have that of
        route 0 and of the entropies.
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    spec = HeadSpec(form=form or LogitForm(), temperature=temperature, tile_bytes=tile_bytes, dtype=dtype)
    with torch.autocast(kind, enabled=False):
        logps, entropy = _RoutedHead.apply(states, weight, bias, targets, spec)  # type: ignore[no-untyped-call]
    return logps, entropy


class _RoutedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, spec: HeadSpec
    ) -> tuple[Tensor, Tensor]:
        logps, norm, entropy = forward_stats(states[0], weight, bias, targets, True, spec)
        assert entropy is not None
        ctx.spec, ctx.routes, ctx.states_dtype = spec, len(states), states.dtype
        ctx.save_for_backward(states[0], weight, bias, targets, norm, entropy)
        ctx.set_materialize_grads(False)
        return logps.expand(len(states), -1).clone(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logps: Tensor | None, g_ent: Tensor | None) -> tuple[Tensor | None, ...]:
        if g_logps is None and g_ent is None:
            return (None,) * 5
        state, weight, bias, targets, norm, entropy = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        _, need_weight, need_bias = ctx.needs_input_grad[:3]
        g_logps = norm.new_zeros(ctx.routes, len(norm)) if g_logps is None else g_logps
        states, factor = state.to(spec.dtype), spec.form.scale / spec.temperature
        by_logp = torch.zeros(state.shape, dtype=norm.dtype, device=state.device)
        by_ent = torch.zeros_like(by_logp) if g_ent is not None else None
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.empty_like(bias) if need_bias else None
        zero, one = torch.zeros_like(norm), torch.ones_like(norm)
        for columns, row_blocks in tiles(len(targets), weight.shape[0], spec.tile_bytes):
            w, b = cut_columns(weight, bias, columns, spec.dtype)
            dw = torch.zeros(w.shape if need_weight else 0, dtype=norm.dtype, device=state.device)
            db = torch.zeros(len(w), dtype=norm.dtype, device=state.device)
            for rows in row_blocks:
                z, slope = tile_logits(states[rows], w, b, spec, norm.dtype)
                scale = factor if slope is None else slope * factor
                at = (targets[rows], columns, norm[rows])
                if by_ent is not None:
                    e = logit_gradient(z, *at, zero[rows], entropy, g_ent, rows).mul_(scale)
                    by_ent[rows] += e.to(spec.dtype) @ w
                d = logit_gradient(z, *at, one[rows], None, None, rows).mul_(scale)
                by_logp[rows] += d.to(spec.dtype) @ w
                if need_weight or need_bias:
                    d *= g_logps[0, rows, None]
                    d = d if by_ent is None else d.add_(e)
                    dw = dw + d.to(spec.dtype).T @ states[rows] if need_weight else dw
                    db += d.sum(0)
            if d_weight is not None:
                d_weight[columns] = dw
            if d_bias is not None:
                d_bias[columns] = db
        d_states = g_logps[:, :, None] * by_logp
        d_states = d_states if by_ent is None else d_states + by_ent
        return d_states.to(ctx.states_dtype), d_weight, d_bias, None, None
