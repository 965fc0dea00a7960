"""Attention of the shared-prefix rows without a mask over the whole row, on a CPU.

A mask that hides other completions hides most of a row, and what it hides is computed all the same. Here every prompt
attends to itself, and every completion to its prompt and itself. Two forms, by what is faster where:

flash     a call of torch's attention for the prompt and one for each completion.
products  plain matrix products, in half precision, whose kernels are several times faster than those of the fused
          attention. It holds the probabilities of a layer, so it is taken only where a token sees at most `_KEYS`
          others on average.

Neither keeps more for the backward than queries, keys, values and outputs: copies of the prompt's keys behind which a
completion's stand, masks and probabilities are made again there.

Legend: R rows of W tokens as in `alignment.layout`; B groups, n tokens of one, P of them its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from alignment.grouped_attention import attending_by
from alignment.layout import Section

_NAME = "prefix_sdpa"
_KEYS = 512
_SECTIONS: ContextVar[Sequence[Section] | None] = ContextVar("sections", default=None)


@contextmanager
def prefix_attention(configs: Sequence[PreTrainedConfig], sections: Sequence[Section]) -> Iterator[None]:
    """Inside the block a model with these configs, given no mask, attends within `sections` (`Layout.sections`).

    For a forward only: nothing of it is known to a backward that runs the model again (gradient checkpointing).
    """
    token = _SECTIONS.set(sections)
    try:
        with attending_by(_NAME, configs):
            yield
    finally:
        _SECTIONS.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [R, heads, W, d], key and value [R, h, W, d] -> [R, W, heads, d]."""
    sections = _SECTIONS.get()
    if sections is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    if (shared := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    rows, _, width, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    cells = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]  # [R W, heads, d] each
    first = sections[0]
    if all(section == first for section in sections) and not first.padding:
        groups = [tuple(t.view(len(sections), first.size, *t.shape[1:]) for t in cells)]
    else:
        parts = [torch.split(t, [section.size for section in sections]) for t in cells]
        groups = [(q[None], k[None], v[None]) for q, k, v in zip(*parts, strict=True)]
    found = []
    for section, (q, k, v) in zip(sections, groups, strict=False):  # a single group stands for all sections
        if section.padding:
            found.append(torch.zeros_like(v).flatten(0, 1))
            continue
        with torch.autocast("cpu", enabled=False):  # off in the backward, which computes some of it again
            out = _group(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), section, scale, dropout)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).view(rows, width, *value.shape[1::2]), None


AttentionInterface.register(_NAME, _attention)


def keep_out_of_graphs() -> None:
    """From now on compiled layers leave their graph for this attention: where its groups lie differs in every batch."""
    AttentionInterface.register(_NAME, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]


def _group(q: Tensor, k: Tensor, v: Tensor, section: Section, scale: float, dropout: float) -> Tensor:
    """[B, heads, n, d] of groups of the same shape."""
    lengths = [length for length in section.completions if length]
    if len(lengths) < 2:
        lengths = []  # one causal text
    parts = [section.size - sum(lengths), *lengths]
    pairs = parts[0] ** 2 + sum(length * (parts[0] + length) for length in lengths)
    if q.dtype in (torch.bfloat16, torch.float16) and not dropout and pairs <= _KEYS * section.size:
        out: Tensor = _Products.apply(q, k, v, parts, scale)  # type: ignore[no-untyped-call]
        return out
    return _flash(q, k, v, parts, scale, dropout)


def _flash(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[int], scale: float, dropout: float) -> Tensor:
    queries, keys, values = (torch.split(t, list(parts), dim=2) for t in (q, k, v))
    found = [
        F.scaled_dot_product_attention(queries[0], keys[0], values[0], dropout_p=dropout, is_causal=True, scale=scale)
    ]
    own = dropout == 0 and q.shape[-1] == v.shape[-1]  # what the kernel below knows
    for query, key, value in zip(queries[1:], keys[1:], values[1:], strict=True):
        if own:
            found.append(_Behind.apply(query, keys[0], key, values[0], value, scale))  # type: ignore[no-untyped-call]
        else:
            mask = _behind(query.shape[2], parts[0], q)
            k_all, v_all = torch.cat([keys[0], key], dim=2), torch.cat([values[0], value], dim=2)
            found.append(
                F.scaled_dot_product_attention(query, k_all, v_all, attn_mask=mask, dropout_p=dropout, scale=scale)
            )
    return torch.cat(found, dim=2)


class _Behind(torch.autograd.Function):
    """A completion behind its prompt, by the kernel of torch's attention on a CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, k1: Tensor, v0: Tensor, v1: Tensor, scale: float) -> Tensor:
        mask = _behind(q.shape[2], k0.shape[2], q)
        out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, torch.cat([k0, k1], dim=2), torch.cat([v0, v1], dim=2), attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k0, k1, v0, v1, out, norm)
        ctx.scale = scale
        found: Tensor = out
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, k1, v0, v1, out, norm = ctx.saved_tensors
        sizes = [k0.shape[2], k1.shape[2]]
        mask = _behind(q.shape[2], k0.shape[2], q)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, torch.cat([k0, k1], dim=2), torch.cat([v0, v1], dim=2), out, norm, 0.0, False,
            attn_mask=mask, scale=ctx.scale,
        )  # fmt: skip
        return dq, *torch.split(dk, sizes, dim=2), *torch.split(dv, sizes, dim=2), None


def _behind(queries: int, prompt: int, like: Tensor) -> Tensor:
    """[queries, prompt + queries] additive: the whole prompt, and the completion up to the query."""
    lowest = torch.finfo(like.dtype).min
    mask = torch.full((queries, prompt + queries), lowest, dtype=like.dtype, device=like.device)
    return mask.triu_(prompt + 1)


class _Products(torch.autograd.Function):
    """`_products`, run again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[int], scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.parts, ctx.scale = parts, scale
        return _products(q, k, v, parts, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = _products(q, k, v, ctx.parts, ctx.scale)
        return *torch.autograd.grad(out, (q, k, v), grad), None, None


def _products(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[int], scale: float) -> Tensor:
    prompt, lengths = parts[0], list(parts[1:])
    sizes = [prompt, sum(lengths)]
    (q0, q1), (k0, k1), (v0, v1) = (torch.split(t, sizes, dim=2) for t in (q * scale, k, v))
    of_prompt: Tensor = (q0 @ k0.mT + _causal(prompt, q)).softmax(-1).to(q.dtype) @ v0
    if not lengths:
        return of_prompt
    before = q1 @ k0.mT  # [B, heads, completion tokens, P]
    if len(set(lengths)) == 1:  # all at once
        pieces = [tuple(t.reshape(*t.shape[:2], len(lengths), lengths[0], -1) for t in (before, q1, k1, v1))]
    else:
        pieces = list(zip(*(torch.split(t, lengths, dim=2) for t in (before, q1, k1, v1)), strict=True))
    seen, own = [], []
    for earlier, query, key, value in pieces:
        scores = torch.cat([earlier, query @ key.mT + _causal(key.shape[-2], q)], dim=-1)
        to_prompt, to_own = torch.split(scores.softmax(-1).to(q.dtype), [prompt, key.shape[-2]], dim=-1)
        mixed = to_own @ value
        flat = query.dim() == 5
        seen.append(to_prompt.flatten(2, 3) if flat else to_prompt)
        own.append(mixed.flatten(2, 3) if flat else mixed)
    return torch.cat([of_prompt, torch.cat(seen, dim=2) @ v0 + torch.cat(own, dim=2)], dim=2)


def _causal(size: int, like: Tensor) -> Tensor:
    """[size, size]: 0 up to the diagonal, the lowest number above it."""
    return _behind(size, 0, like)
