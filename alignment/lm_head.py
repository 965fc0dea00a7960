"""Token log-probs and entropies from hidden states, without ever holding `[tokens, vocab]`.

The projection onto the vocabulary is computed in tiles of at most `tile_bytes`; the forward keeps two or three running
numbers per token (maximum, sum of exponentials, and for the entropy the sum weighted by the logit), the backward
turns each tile into gradients at once. Where all tiles fit into `kept_bytes` the backward finds them as the forward
left them, elsewhere it computes each again: to the same bits, for a quarter more products. Temporary memory is then one
tile whatever V is; what must be as large as the weight is only the weight's own gradient, and only when the weight is
trained.

With logits z, p = softmax(z), log-prob l_y = z_y - log sum exp z and entropy H = -sum p log p:
    dl_y/dz_v = 1[v = y] - p_v          dH/dz_v = -p_v (log p_v + H)

Legend: n scored tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KEPT_BYTES = 128 << 20
"""Bound of the logits that are kept for the backward."""

# Narrower vocabulary tiles than this make the matrix product slow; beyond it the token axis is cut instead.
_MIN_COLUMNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitForm:
    """How an architecture turns the projection h W^T + b into logits: z = cap * tanh(scale * (h W^T + b) / cap).

    Args:
        scale: factor on the projection (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`).
        softcap: cap of Gemma's `final_logit_softcapping`; None: no cap.
    """

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Everything that is not a tensor: logit form, temperature, tile size, the dtype of the matrix products, and
    whether the products are kept for the backward."""

    form: LogitForm
    temperature: float
    tile_bytes: int
    dtype: torch.dtype
    keep: bool = False


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    form: LogitForm | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    tile_bytes: int = 8 << 20,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, when asked, the entropy of each distribution.

    Args:
        hidden: [n, H] states that predict the targets. weight: [V, H]. bias: [V] or None.
        targets: [n] int64 token ids.
        temperature: logits are divided by it, after `form`.
        tile_bytes: bound in bytes of one tile of logits (in fp32).
        kept_bytes: where the logits of all tokens, in the dtype of the products, are no larger than this they are kept
            for the backward. It changes no result.

    Returns:
        log-probs [n] and entropies [n] in nats (or None), in fp32 (float64 for float64 input). Both are differentiable
        with respect to hidden, weight and bias; a weight that needs no gradient costs none. The matrix products run in
        the dtype of `hidden` (or of autocast), everything after them in fp32.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    spec = HeadSpec(
        form=form or LogitForm(),
        temperature=temperature,
        tile_bytes=tile_bytes,
        dtype=dtype,
        keep=trained and len(targets) * weight.shape[0] * dtype.itemsize <= kept_bytes,
    )
    with torch.autocast(kind, enabled=False):
        logps, ent = _TiledHead.apply(hidden, weight, bias, targets, entropy, spec)  # type: ignore[no-untyped-call]
    return logps, ent


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, entropy: bool, spec: HeadSpec
    ) -> tuple[Tensor, Tensor | None]:
        kept: list[Tensor] = []
        logps, norm, ent = forward_stats(hidden, weight, bias, targets, entropy, spec, kept)
        ctx.spec = spec
        ctx.save_for_backward(hidden, weight, bias, targets, norm, ent, *kept)
        ctx.set_materialize_grads(False)
        return logps, ent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logps: Tensor | None, g_ent: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, ent, *kept = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if g_logps is None and g_ent is None:
            return (None,) * 6
        n, states, stats = len(targets), hidden.to(spec.dtype), norm.dtype
        g_logps = torch.zeros_like(norm) if g_logps is None else g_logps
        d_hidden = torch.zeros(hidden.shape, dtype=stats, device=hidden.device) if need_hidden else None
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.empty_like(bias) if need_bias else None
        found = iter(kept)
        for columns, row_blocks in tiles(n, weight.shape[0], spec.tile_bytes):
            w, b = cut_columns(weight, bias, columns, spec.dtype)
            dw = torch.zeros(w.shape if need_weight else 0, dtype=stats, device=hidden.device)
            db = torch.zeros(w.shape[0], dtype=stats, device=hidden.device)
            for rows in row_blocks:
                z, slope = form_logits(next(found) if kept else project(states[rows], w, b), spec, stats)
                d = logit_gradient(z, targets[rows], columns, norm[rows], g_logps[rows], ent, g_ent, rows)
                d *= spec.form.scale / spec.temperature
                if slope is not None:
                    d *= slope
                if need_bias:
                    db += d.sum(0)
                d = d.to(spec.dtype)
                if d_hidden is not None:
                    d_hidden[rows] += d @ w
                if need_weight:
                    dw += d.T @ states[rows]
            if d_weight is not None:
                d_weight[columns] = dw
            if d_bias is not None:
                d_bias[columns] = db
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None


def forward_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    entropy: bool,
    spec: HeadSpec,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """([n] log-probs of the targets, [n] log sum exp of the logits, [n] entropies if asked), in one walk. With
    `spec.keep` the product of each tile goes into `kept`, in the order of the walk."""
    n, states = len(targets), hidden.to(spec.dtype)
    stats = stats_dtype(hidden)
    top = torch.full((n,), -torch.inf, dtype=stats, device=hidden.device)
    total, weighted, picked = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
    for columns, row_blocks in tiles(n, weight.shape[0], spec.tile_bytes):
        w, b = cut_columns(weight, bias, columns, spec.dtype)
        for rows in row_blocks:
            product = project(states[rows], w, b)
            if spec.keep and kept is not None:
                kept.append(product)
            z, _ = form_logits(product, spec, stats)
            picked[rows] = torch.where(*_at_target(targets[rows], columns, z), picked[rows])
            new_top = torch.maximum(top[rows], z.amax(-1))
            shift = top[rows] - new_top  # <= 0; -inf on the first tile, where the sums are still 0
            z = z - new_top[:, None]
            e = z.exp() if entropy else z.exp_()
            if entropy:
                # sums are relative to the running maximum, so moving it by `shift` moves the weighted sum too
                moved = torch.where(total[rows] > 0, weighted[rows] + shift * total[rows], total[rows])
                weighted[rows] = shift.exp() * moved + (e * z).sum(-1)
            total[rows] = shift.exp() * total[rows] + e.sum(-1)
            top[rows] = new_top
    log_total = total.log()
    norm = top + log_total
    ent = log_total - weighted / total if entropy else None
    return picked - norm, norm, ent


@torch.no_grad()
def log_collision(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    form: LogitForm | None = None,
    temperature: float = 1.0,
    tile_bytes: int = 8 << 20,
) -> Tensor:
    """[n, H] states -> [n] log sum_v p_v^2, without gradient: the log-probability that two tokens drawn are the same.

    The arguments are those of `score_tokens`; a walk of its own through the head.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    spec = HeadSpec(form=form or LogitForm(), temperature=temperature, tile_bytes=tile_bytes, dtype=dtype)
    n, stats = len(hidden), stats_dtype(hidden)
    top = torch.full((n,), -torch.inf, dtype=stats, device=hidden.device)
    total, squares = torch.zeros_like(top), torch.zeros_like(top)
    with torch.autocast(kind, enabled=False):
        states = hidden.to(dtype)
        for columns, row_blocks in tiles(n, weight.shape[0], tile_bytes):
            w, b = cut_columns(weight, bias, columns, dtype)
            for rows in row_blocks:
                z, _ = tile_logits(states[rows], w, b, spec, stats)
                new_top = torch.maximum(top[rows], z.amax(-1))
                shrink = (top[rows] - new_top).exp()
                e = z.sub_(new_top[:, None]).exp_()
                total[rows] = shrink * total[rows] + e.sum(-1)
                squares[rows] = shrink * shrink * squares[rows] + e.square().sum(-1)
                top[rows] = new_top
    return squares.log() - 2 * total.log()


def whole_stats(
    logits: Tensor, temperature: float, targets: Tensor, entropy: bool, collision: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `score_tokens` and `log_collision` compute, from whole logits [n, V] that the model's own head made."""
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    lp = log_p.gather(1, targets[:, None])[:, 0]
    ent = -(log_p.exp() * log_p).sum(-1) if entropy else None
    return lp, ent, (2 * log_p.detach()).logsumexp(-1) if collision else None


def stats_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def tiles(n: int, vocab: int, tile_bytes: int) -> Iterator[tuple[slice, list[slice]]]:
    """Vocabulary slices, each with the token slices that keep a tile of fp32 logits within `tile_bytes`.

    All tokens share a vocabulary slice as long as it stays wide enough: the weight is then read once.
    """
    cells = max(1, tile_bytes // 4)
    columns = min(vocab, max(cells // max(1, n), min(vocab, _MIN_COLUMNS)))
    rows = min(n, max(1, cells // columns))
    row_blocks = [slice(i, min(i + rows, n)) for i in range(0, n, max(1, rows))]
    for start in range(0, vocab, columns):
        yield slice(start, min(start + columns, vocab)), row_blocks


def cut_columns(
    weight: Tensor, bias: Tensor | None, columns: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    return weight[columns].to(dtype), None if bias is None else bias[columns].to(dtype)


def tile_logits(
    states: Tensor, w: Tensor, b: Tensor | None, spec: HeadSpec, stats: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """One tile of logits [rows, columns], and the slope of the softcap there (None without one)."""
    return form_logits(project(states, w, b), spec, stats)


def project(states: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[rows, columns] h W^T + b."""
    return states @ w.T if b is None else torch.addmm(b, states, w.T)


def form_logits(product: Tensor, spec: HeadSpec, stats: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """What `project` returned as logits, and the slope of the softcap there (None without one). `product` stays as it
    is, and is what is returned where there is nothing to do."""
    z, slope = product.to(stats), None
    if spec.form.scale != 1.0:
        z = z * spec.form.scale
    if spec.form.softcap is not None:
        t = (z / spec.form.softcap).tanh_()
        slope = 1 - t * t
        z = t.mul_(spec.form.softcap)
    if spec.temperature != 1.0:
        z = z / spec.temperature
    return z, slope


def _at_target(targets: Tensor, columns: slice, z: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets lie in this tile [rows] bool, and the value of `z` there [rows] (any value elsewhere)."""
    local = targets - columns.start
    inside = (local >= 0) & (local < z.shape[1])
    return inside, z.gather(1, local.clamp(0, z.shape[1] - 1)[:, None])[:, 0]


def logit_gradient(
    z: Tensor,
    targets: Tensor,
    columns: slice,
    norm: Tensor,
    g_logps: Tensor,
    ent: Tensor | None,
    g_ent: Tensor | None,
    rows: slice,
) -> Tensor:
    """Gradient with respect to one tile of logits [rows, columns]; leaves `z` as it is."""
    z = z - norm[:, None]
    if ent is not None and g_ent is not None:
        factor = (z + ent[rows, None]).mul_(-g_ent[rows, None]).sub_(g_logps[:, None])
        d = z.exp_().mul_(factor)
    else:
        d = z.exp_().mul_(-g_logps[:, None])
    local = targets - columns.start
    inside = (local >= 0) & (local < d.shape[1])
    d.scatter_add_(1, local.clamp(0, d.shape[1] - 1)[:, None], torch.where(inside, g_logps, 0)[:, None])
    return d
