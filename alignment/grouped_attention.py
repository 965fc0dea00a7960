"""Attention over a cache without copying it, for models with fewer key-value heads than query heads.

transformers' sdpa attention repeats keys and values to the number of query heads whenever there is more than one query
per row, which in a decode step copies the whole cache, enlarged. Here the query heads that share a key-value head
become more queries of that head instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "grouped_sdpa"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [R, heads, S, d], key and value [R, h, T, d], mask [R, 1, S, T] -> [R, S, heads, d]."""
    shared = query.shape[1] // key.shape[1]
    if shared == 1 or attention_mask is None or options.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, queries, size = query.shape
    out = F.scaled_dot_product_attention(
        query.reshape(rows, heads // shared, shared * queries, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, shared, 1),
        scale=options.get("scaling"),
    )
    return out.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


def configs_of(inner: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that a model and its parts look up their kind of attention in."""
    return list({id(m.config): m.config for m in inner.modules() if isinstance(m, PreTrainedModel)}.values())


@contextmanager
def attending_by(name: str, configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Inside the block a model with these configs that attends by sdpa or flex_attention does so by the attention of
    this name."""
    before = [(config, config._attn_implementation) for config in configs]
    changed = [(config, own) for config, own in before if own in ("sdpa", "flex_attention")]
    try:
        for config, _ in changed:
            config._attn_implementation = name
        yield
    finally:
        for config, own in changed:
            config._attn_implementation = own


@contextmanager
def grouped_attention(configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Inside the block a model with these configs that attends by sdpa or flex_attention attends by sdpa, uncopied.

    It must be given its masks: under this name transformers makes none.
    """
    with attending_by(_NAME, configs):
        yield
