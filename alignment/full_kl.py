"""Exact divergences of the policy from a reference over the whole vocabulary, without ever holding `[tokens, vocab]`.

With p the policy's distribution at a token, q the reference's, m = (p + q) / 2, from hidden states through LM heads:

name            value                              gradient with respect to the policy's logit v
full_reverse    R = KL(p||q)                       p_v (log p_v - log q_v - R)
full_jeffreys   (KL(p||q) + KL(q||p)) / 2          [p_v (log p_v - log q_v - R) + p_v - q_v] / 2
full_js         J = (M + KL(q||m)) / 2             p_v (log p_v - log m_v - M) / 2,  M = KL(p||m)

Half of Jeffreys' divergence is the expectation of the estimator `sym`; Jensen-Shannon is at most log 2 and finite where
supports differ. The vocabulary is walked in the tiles of `alignment.lm_head`: once for both normalisers, once for the
divergence, once more backwards. The reference gets no gradient.

Legend: n scored tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from alignment.causal_lm import logit_form
from alignment.errors import UserError
from alignment.lm_head import HeadSpec, LogitForm, cut_columns, stats_dtype, tile_logits, tiles
from alignment.spread import gathered

FullKL = Literal["full_reverse", "full_jeffreys", "full_js"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An LM head: weight [V, H], bias [V] or None, and how its projection becomes logits."""

    weight: Tensor
    bias: Tensor | None = None
    form: LogitForm = field(default_factory=LogitForm)

    @classmethod
    def of(
        cls, model: nn.Module, what: str = "a full-vocabulary KL", instead: str = "use k1, k2, k3 or sym"
    ) -> Head:
        """That of a causal language model, wrapped by peft or not. Raises UserError where it is not a plain linear
        layer (an adapter on it, for example): its logits then are not hidden states times a weight. `what` needs the
        head, and what to do `instead` are for that message. A collective for a sharded model, whose head is then whole
        on every rank for as long as this is kept."""
        inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        head = None if inner is None else inner.get_output_embeddings()  # type: ignore[no-untyped-call]
        if inner is None or type(head) is not nn.Linear:
            raise UserError(
                f"{what} needs a plain linear LM head; {type(model).__name__} has another, or an adapter on it: "
                f"{instead}"
            )
        bias = None if head.bias is None else gathered(head.bias)
        form = logit_form(inner.config.get_text_config(decoder=True))
        return cls(weight=gathered(head.weight), bias=bias, form=form)


def full_kl(
    kind: FullKL,
    hidden: Tensor,
    head: Head,
    ref_hidden: Tensor,
    ref_head: Head,
    *,
    temperature: float = 1.0,
    tile_bytes: int = 8 << 20,
) -> Tensor:
    """[n] divergence in nats at each token, in fp32 (float64 for float64 input).

    Differentiable with respect to hidden, head.weight and head.bias; a weight that needs no gradient costs none.

    Args:
        kind: "full_reverse", "full_jeffreys" or "full_js".
        hidden, ref_hidden: [n, H], [n, H'] states that predict the tokens, under the policy and under the reference.
        head, ref_head: their LM heads, over the same vocabulary.
        temperature: logits of both are divided by it.
        tile_bytes: bound in bytes of one tile of logits (in fp32); a handful of tiles are held at a time.
    """
    if kind not in get_args(FullKL):
        raise ValueError(f"divergence {kind!r} is not known; use {', '.join(get_args(FullKL))}")
    if head.weight.shape[0] != ref_head.weight.shape[0] or len(hidden) != len(ref_hidden):
        raise ValueError(
            f"the policy has {len(hidden)} tokens over {head.weight.shape[0]} entries, the reference {len(ref_hidden)} "
            f"over {ref_head.weight.shape[0]}; both must be equal"
        )
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    reference = _Side(
        states=ref_hidden.detach().to(dtype),
        weight=ref_head.weight,
        bias=ref_head.bias,
        spec=HeadSpec(form=ref_head.form, temperature=temperature, tile_bytes=tile_bytes, dtype=dtype),
    )
    spec = HeadSpec(form=head.form, temperature=temperature, tile_bytes=tile_bytes, dtype=dtype)
    with torch.autocast(device, enabled=False):
        out: Tensor = _FullKL.apply(hidden, head.weight, head.bias, kind, spec, reference)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One model's states [n, H] with its head, all without gradient."""

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    spec: HeadSpec

    def tile(self, rows: slice, columns: slice, stats: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Logits [rows, columns] and the slope of the softcap there."""
        w, b = cut_columns(self.weight, self.bias, columns, self.spec.dtype)
        return tile_logits(self.states[rows], w, b, self.spec, stats)


def _walk(n: int, side: _Side) -> Iterator[tuple[slice, slice]]:
    for columns, row_blocks in tiles(n, side.weight.shape[0], side.spec.tile_bytes):
        for rows in row_blocks:
            yield rows, columns


def _log_norm(n: int, side: _Side, stats: torch.dtype) -> Tensor:
    """[n] log sum exp of the logits."""
    norm = torch.full((n,), -torch.inf, dtype=stats, device=side.states.device)
    for rows, columns in _walk(n, side):
        norm[rows] = torch.logaddexp(norm[rows], side.tile(rows, columns, stats)[0].logsumexp(-1))
    return norm


def _times_log(p: Tensor, log_ratio: Tensor) -> Tensor:
    """p log(p / q), where 0 log 0 is 0."""
    return torch.where(p > 0, p * log_ratio, 0)


def _parts(kind: FullKL, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """([rows] this tile's part of the term from p, the same of the term from q)."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "full_js":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return _times_log(p, log_p - log_m).sum(-1), _times_log(q, log_q - log_m).sum(-1)
    forward = _times_log(q, log_q - log_p).sum(-1) if kind == "full_jeffreys" else torch.zeros_like(log_p[:, 0])
    return _times_log(p, log_p - log_q).sum(-1), forward


def _logit_gradient(kind: FullKL, log_p: Tensor, log_q: Tensor, from_p: Tensor) -> Tensor:
    """[rows, columns] of the table in the module docstring; from_p [rows] is R or M."""
    p = log_p.exp()
    if kind == "full_js":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (_times_log(p, log_p - log_m) - p * from_p[:, None]) / 2
    reverse = _times_log(p, log_p - log_q) - p * from_p[:, None]
    return reverse if kind == "full_reverse" else (reverse + p - log_q.exp()) / 2


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: FullKL, spec: HeadSpec, reference: _Side
    ) -> Tensor:
        n, stats = len(hidden), stats_dtype(hidden)
        policy = _Side(states=hidden.to(spec.dtype), weight=weight, bias=bias, spec=spec)
        norm, ref_norm = _log_norm(n, policy, stats), _log_norm(n, reference, stats)
        from_p, from_q = torch.zeros_like(norm), torch.zeros_like(norm)
        for rows, columns in _walk(n, policy):
            log_p = policy.tile(rows, columns, stats)[0] - norm[rows, None]
            log_q = reference.tile(rows, columns, stats)[0] - ref_norm[rows, None]
            p_part, q_part = _parts(kind, log_p, log_q)
            from_p[rows] += p_part
            from_q[rows] += q_part
        ctx.kind, ctx.spec, ctx.reference = kind, spec, reference
        ctx.save_for_backward(hidden, weight, bias, norm, ref_norm, from_p)
        return from_p if kind == "full_reverse" else (from_p + from_q) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, norm, ref_norm, from_p = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        policy = _Side(states=hidden.to(spec.dtype), weight=weight, bias=bias, spec=spec)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        n, stats = len(hidden), norm.dtype
        d_hidden = torch.zeros(hidden.shape, dtype=stats, device=hidden.device) if need_hidden else None
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.empty_like(bias) if need_bias else None
        for columns, row_blocks in tiles(n, len(weight), spec.tile_bytes):
            w, _ = cut_columns(weight, None, columns, spec.dtype)
            dw = torch.zeros(w.shape if need_weight else 0, dtype=stats, device=hidden.device)
            db = torch.zeros(len(w), dtype=stats, device=hidden.device)
            for rows in row_blocks:
                z, slope = policy.tile(rows, columns, stats)
                log_q = ctx.reference.tile(rows, columns, stats)[0] - ref_norm[rows, None]
                d = _logit_gradient(ctx.kind, z - norm[rows, None], log_q, from_p[rows]) * grad[rows, None]
                d *= spec.form.scale / spec.temperature
                if slope is not None:
                    d *= slope
                if need_bias:
                    db += d.sum(0)
                d = d.to(spec.dtype)
                if d_hidden is not None:
                    d_hidden[rows] += d @ w
                if need_weight:
                    dw += d.T @ policy.states[rows]
            if d_weight is not None:
                d_weight[columns] = dw
            if d_bias is not None:
                d_bias[columns] = db
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None
