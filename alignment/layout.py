"""Rows for the shared-prefix path: each prompt once, its completions behind it, several groups in a row.

A row reads `prompt A | A's completion 1 | A's completion 2 | prompt B | ...`. Positions restart: a completion's
position ids continue its prompt's, whatever stands between them. The mask lets a token see its own prompt and its own
completion and nothing else, so every completion is computed as if it were alone with its prompt.

Legend: P, N, C, L as in `alignment.batches`; R rows of W tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from alignment.batches import GroupBatch, within


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive cells of a row: a prompt with its completions behind it, or the padding at the end.

    Args:
        prompt: tokens of the prompt, or cells of padding. completions: tokens of each completion.
    """

    prompt: int
    completions: tuple[int, ...] = ()
    padding: bool = False

    @property
    def size(self) -> int:
        return self.prompt + sum(self.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where every token of a batch stands.

    Args:
        sections: what the cells of all rows hold, in their order.
        input_ids, position_ids: [R, W] int64.
        group: [R, W] int64, the prompt a token belongs to; -1 for padding.
        branch: [R, W] int64, 1 + the completion a token belongs to; 0 for prompt tokens and padding.
        place: [C] int64, index into the flattened [R * W] of each completion token.
        predictor: [C] int64, index of the token whose state predicts it: the last prompt token, or the one before.
    """

    sections: tuple[Section, ...]
    input_ids: Tensor
    position_ids: Tensor
    group: Tensor
    branch: Tensor
    place: Tensor
    predictor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMask:
    """What a layer may see beyond causality.

    Args:
        window: a token sees the last `window` positions, its own included; None: all.
        chunk: a token sees only positions of its own chunk of this many; None: all.
    """

    window: int | None = None
    chunk: int | None = None


def best_fit_decreasing(sizes: Sequence[int], width: int) -> list[list[int]]:
    """Pack items of the given sizes into rows of `width`: the longest first, each into the fullest row it fits.

    Raises ValueError for an item wider than a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[item] > width:
            raise ValueError(f"an item of {sizes[item]} tokens does not fit a row of {width}")
        at = bisect_left(room, (sizes[item], -1))
        if at == len(room):
            rows.append([])
            free, row = width, len(rows) - 1
        else:
            free, row = room.pop(at)
        rows[row].append(item)
        insort(room, (free - sizes[item], row))
    return rows


def pack(batch: GroupBatch, pad_id: int) -> Layout:
    """Lay out a batch of at least one group in rows as wide as its longest group. `pad_id` fills, it never masks."""
    device = batch.device
    inside = _by_group(batch)
    sizes = [section.size for section in inside]
    width = max(sizes)
    rows = best_fit_decreasing(sizes, width)
    starts = [0] * len(sizes)
    sections = []
    for r, members in enumerate(rows):
        cell = r * width
        for g in members:
            starts[g] = cell
            cell += sizes[g]
            sections.append(inside[g])
        if room := (r + 1) * width - cell:
            sections.append(Section(room, padding=True))
    start = torch.tensor(starts, dtype=torch.int64, device=device)

    cells = len(rows) * width
    input_ids = torch.full((cells,), pad_id, dtype=torch.int64, device=device)
    position_ids = torch.zeros(cells, dtype=torch.int64, device=device)
    group = torch.full((cells,), -1, dtype=torch.int64, device=device)
    branch = torch.zeros(cells, dtype=torch.int64, device=device)

    steps = within(batch.prompt_lengths)
    groups = torch.arange(batch.num_prompts, device=device)
    at = start.repeat_interleave(batch.prompt_lengths) + steps
    input_ids[at], position_ids[at] = batch.prompt_ids, steps
    group[at] = groups.repeat_interleave(batch.prompt_lengths)

    row, steps = batch.row_of(), within(batch.completion_lengths)
    before = batch.completion_lengths.cumsum(0) - batch.completion_lengths  # [N] completion tokens of earlier rows
    first = torch.searchsorted(batch.group_of, batch.group_of)  # [N] first completion of the same group
    prompt_length = batch.prompt_lengths[batch.group_of]
    begin = start[batch.group_of] + prompt_length + before - before[first]
    place = begin[row] + steps
    input_ids[place], position_ids[place] = batch.completion_ids, prompt_length[row] + steps
    group[place], branch[place] = batch.group_of[row], row + 1

    last_prompt = (start + batch.prompt_lengths - 1)[batch.group_of]
    shape = (len(rows), width)
    return Layout(
        sections=tuple(sections),
        input_ids=input_ids.view(shape),
        position_ids=position_ids.view(shape),
        group=group.view(shape),
        branch=branch.view(shape),
        place=place,
        predictor=torch.where(steps == 0, last_prompt[row], place - 1),
    )


def _by_group(batch: GroupBatch) -> list[Section]:
    lengths: list[list[int]] = [[] for _ in range(batch.num_prompts)]
    for g, length in zip(batch.group_of.tolist(), batch.completion_lengths.tolist(), strict=True):
        lengths[g].append(length)
    return [Section(p, tuple(own)) for p, own in zip(batch.prompt_lengths.tolist(), lengths, strict=True)]


def layer_masks(config: PreTrainedConfig) -> dict[str, LayerMask]:
    """The kinds of attention layers a decoder's config names, with what each may see.

    Raises ValueError naming a kind that no attention mask describes (recurrent, convolutional, sparse layers).
    """
    window = getattr(config, "sliding_window", None)
    known = {
        "full_attention": LayerMask(),
        "sliding_attention": LayerMask(window=window),
        "chunked_attention": LayerMask(chunk=getattr(config, "attention_chunk_size", None)),
    }
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ValueError(f"it has layers of kind {', '.join(unknown)}, which an attention mask does not describe")
    return {kind: known[kind] for kind in sorted(set(kinds))}


def attention_mask(layout: Layout, layer: LayerMask) -> Tensor:
    """[R, 1, W, W] bool, True where the query (third axis) may see the key (fourth).

    Every token sees itself, padding included, so no softmax runs over nothing.
    """
    width = layout.group.shape[1]
    group_q, group_k = layout.group[:, :, None], layout.group[:, None, :]
    branch_q, branch_k = layout.branch[:, :, None], layout.branch[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool, device=layout.group.device).tril()
    seen = causal & (group_q == group_k) & ((branch_k == 0) | (branch_k == branch_q))
    position_q, position_k = layout.position_ids[:, :, None], layout.position_ids[:, None, :]
    if layer.window is not None:
        seen &= position_q - position_k < layer.window
    if layer.chunk is not None:
        seen &= position_q // layer.chunk == position_k // layer.chunk
    return seen[:, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as the term eager attention adds to its scores: 0 where True, the lowest finite number elsewhere."""
    blocked = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return blocked.masked_fill_(~mask, torch.finfo(dtype).min)
