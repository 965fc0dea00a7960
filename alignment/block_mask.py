"""Block masks of the shared-prefix rows for torch's FlexAttention, which computes only the blocks that something sees.

What a token sees are two runs of cells: the end of its prompt (none for a prompt token), and its own text up to itself.
Windows and chunks only move where a run begins. So blocks are counted from where runs begin and end, and no mask over
whole rows exists at any time, nor does the kernel read more than three numbers per query to decide about a key.

FlexAttention: Dong et al. 2024 (arXiv 2412.05496). Legend: R rows of W tokens as in `alignment.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from alignment.layout import LayerMask, Layout

_BLOCK = 128  # torch's own choice; its kernels want multiples of their tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """The cells each token sees, [R, W] int32 each: prompt_from <= k < prompt_to, and own_from <= k <= itself."""

    prompt_from: Tensor
    prompt_to: Tensor
    own_from: Tensor


def block_mask(layout: Layout, layer: LayerMask) -> BlockMask:
    """The mask that `alignment.layout.attention_mask` gives as a whole; for any number of heads."""
    reach = _reach(layout, layer)
    seen = _seen(reach)
    partial, full = (seen > 0) & (seen < _BLOCK**2), seen == _BLOCK**2
    width = layout.group.shape[1]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        prompt = (k >= reach.prompt_from[b, q]) & (k < reach.prompt_to[b, q])
        return prompt | ((k >= reach.own_from[b, q]) & (k <= q))

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(width, width)
    )


def _reach(layout: Layout, layer: LayerMask) -> _Reach:
    shape, device = layout.group.shape, layout.group.device
    width = shape[1]
    sizes = [section.size for section in layout.sections]
    begins = [sum(sizes[:i]) % width for i in range(len(sizes))]
    facts = torch.tensor([begins, [section.prompt for section in layout.sections]], dtype=torch.int32)
    spread = facts.repeat_interleave(torch.tensor(sizes), dim=1).to(device)
    begin, prompt = spread.view(2, *shape)

    position = layout.position_ids.int()
    first = torch.zeros_like(position)  # the first position a token sees
    if layer.window is not None:
        first = (position - layer.window + 1).clamp(min=0)
    if layer.chunk is not None:
        first = torch.maximum(first, position - position % layer.chunk)
    cell = torch.arange(width, dtype=torch.int32, device=device).expand(shape)
    behind = layout.branch > 0
    own = cell - (position - prompt)  # of a completion's token: where its completion begins
    return _Reach(
        prompt_from=begin + torch.minimum(first, prompt),
        prompt_to=torch.where(behind, begin + prompt, 0),
        own_from=torch.where(behind, own + (first - prompt).clamp(min=0), begin + first),
    )


def _seen(reach: _Reach) -> Tensor:
    """[R, blocks, blocks] int32: pairs of a query and a key it sees, for blocks of queries and of keys."""
    rows, width = reach.own_from.shape
    blocks = -(-width // _BLOCK)
    start = torch.arange(0, blocks * _BLOCK, _BLOCK, dtype=torch.int32, device=reach.own_from.device)
    cell = torch.arange(1, width + 1, dtype=torch.int32, device=start.device).expand(rows, width)
    seen = torch.zeros(rows, blocks * _BLOCK, blocks, dtype=torch.int32, device=start.device)
    for begin, end in ((reach.prompt_from, reach.prompt_to), (reach.own_from, cell)):
        overlap = torch.minimum(end[..., None], start + _BLOCK) - torch.maximum(begin[..., None], start)
        seen[:, :width] += overlap.clamp_(min=0)
    return seen.view(rows, blocks, _BLOCK, blocks).sum(2, dtype=torch.int32)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[R, Q, K] bool -> how many blocks of keys each block of queries has [R, 1, Q], and which come first [.., K]."""
    chosen = blocks[:, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()
