"""Decoding with one copy of each prompt: the completions of a prompt are branches of one cache row.

`alignment.branches` says where everything stands and what may see what; here the model runs. A decode step feeds one
token per slot, [R, S] at once: position ids continue the prompt's, and masks of each kind of layer keep the branches
apart (it is the layout of `alignment.layout`, one column of tokens at a time). The LM head is applied to live
completions only. Dead slots are left until clearing them saves more than the copy of the cache costs.

Legend: P, V, H as in `alignment.batches`; n, R, S, T as in `alignment.branches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.batches import Group, GroupBatch
from alignment.branches import Branches, StepCosts
from alignment.causal_lm import decoder_of, logit_form
from alignment.decoding import Decode, cache_argument
from alignment.grouped_attention import configs_of, grouped_attention
from alignment.kv_cache import KVCache
from alignment.layout import LayerMask, additive, attention_mask, layer_masks, pack

# Tokens of one prefill pass; bounds its [rows, width, width] masks and its activations.
_PREFILL_TOKENS = 16384

# Steps of room allocated at first, then doubled: completions are often far shorter than allowed.
_FIRST_ROOM = 128

# A rearrangement copies the cache once; it must make the later steps at least this much cheaper.
_WORTH_COPYING = 0.8

# Multiply-adds in the time of reading one byte, on a CPU and on an accelerator; it decides how wide rows are.
_CPU_BALANCE, _ACCELERATOR_BALANCE = 4.0, 80.0


class SharedDecoder:
    """A Decoder over a transformers causal language model, adapters injected or not.

    Args:
        inner: a model whose attention takes a mask of its own (`alignment.probe.obstacle`).
        pad_id: any token id; it fills, it never masks.

    Raises ValueError for a model that takes no cache or has layers that no mask describes.
    """

    same_length = False

    def __init__(self, inner: PreTrainedModel, pad_id: int) -> None:
        self._inner, self.pad_id = inner, pad_id
        self._config = inner.config.get_text_config(decoder=True)
        self._trunk = decoder_of(inner)
        self._head: nn.Module = inner.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._form = logit_form(self._config)
        self._cache_name = cache_argument(self._trunk)
        self._attending = configs_of(inner)
        self.layers = layer_masks(self._config)
        embedded = [p for m in self._trunk.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
        self._weights = sum(p.numel() for p in self._trunk.parameters()) - sum(p.numel() for p in embedded)

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], steps: int) -> Decode:
        parts = list(_chunks(prompts, _PREFILL_TOKENS))
        width = max(len(p) for p in prompts)
        caches, states = zip(*(self._prefill(part, width) for part in parts), strict=True)
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        branches = Branches.opened(lengths, torch.tensor(counts, device=self.device))
        return _SharedDecode(self, KVCache.stack(caches), branches, torch.cat(states)[branches.prompt_of], steps)

    def logits(self, rows: Tensor) -> Tensor:
        z: Tensor = self._head(rows)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self._form.scale != 1.0:
            z = z * self._form.scale
        if self._form.softcap is not None:
            z = self._form.softcap * torch.tanh(z / self._form.softcap)
        return z

    def run(self, cache: KVCache, input_ids: Tensor, position_ids: Tensor, masks: dict[str, Tensor]) -> Tensor:
        """[rows, tokens] ids -> final states [rows, tokens, H]; `cache` takes in their keys and values."""
        mask = masks if len(masks) > 1 else next(iter(masks.values()))  # by name where there are several kinds
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask, self._cache_name: cache}
        with grouped_attention(self._attending):
            states: Tensor = self._trunk(**inputs, use_cache=True)[0]
        cache.advance(input_ids.shape[1])
        return states

    def costs(self, cache: KVCache) -> StepCosts:
        heads = getattr(self._config, "num_attention_heads", cache.heads)
        balance = _CPU_BALANCE if self.device.type == "cpu" else _ACCELERATOR_BALANCE
        cell = cache.elements_per_token
        return StepCosts(
            token=self._weights, score=cell * heads / cache.heads, read=cell * cache.dtype.itemsize * balance
        )

    def _prefill(self, prompts: Sequence[Sequence[int]], width: int) -> tuple[KVCache, Tensor]:
        """Packed in rows: the cache of P rows with the prompts right-aligned in `width` columns, last states [P, H]."""
        batch = GroupBatch.from_groups([Group(prompt=p, completions=()) for p in prompts]).to(self.device)
        layout = pack(batch, self.pad_id)
        masks = {kind: attention_mask(layout, layer) for kind, layer in self.layers.items()}
        if self._config._attn_implementation == "eager":
            masks = {kind: additive(mask, self._inner.dtype) for kind, mask in masks.items()}
        cache = KVCache()
        states = self.run(cache, layout.input_ids, layout.position_ids, masks)
        group = layout.group.flatten()
        cells = torch.arange(len(group), device=self.device)
        last = torch.zeros(len(prompts), dtype=torch.int64, device=self.device)
        last.scatter_reduce_(0, group[group >= 0], cells[group >= 0], "amax")
        row, end = last // layout.input_ids.shape[1], last % layout.input_ids.shape[1]
        column = end[:, None] + torch.arange(1 - width, 1, device=self.device)
        cache.rearrange(row[:, None].expand_as(column), column.clamp(min=0), room=0)
        return cache, states.flatten(0, 1)[last]


class _SharedDecode:
    def __init__(self, decoder: SharedDecoder, cache: KVCache, branches: Branches, first: Tensor, steps: int) -> None:
        self.first = first
        self._decoder, self._cache, self._branches, self._steps = decoder, cache, branches, steps
        self._costs = decoder.costs(cache)
        self._longest = int(branches.lengths.max()) + steps
        self._rearrange()

    def step(self, tokens: Tensor) -> Tensor:
        if self._wasteful or self._cache.room < self._branches.width:
            self._rearrange()
        b = self._branches
        ids = torch.full((b.rows * b.width,), self._decoder.pad_id, dtype=torch.int64, device=tokens.device)
        ids[b.slot] = tokens
        position = b.row_lengths + b.done
        states = self._decoder.run(
            self._cache, ids.view(b.rows, -1), position[:, None].expand(-1, b.width), self._masks(position)
        )
        self._branches = b.stepped()
        return states.flatten(0, 1)[b.slot]

    def keep(self, alive: Tensor) -> None:
        self._branches = b = self._branches.kept(alive)
        _, cost = b.best(self._costs, self._steps)
        self._wasteful = cost < _WORTH_COPYING * b.cost(self._costs, self._steps)

    def _rearrange(self) -> None:
        """Put the live completions into rows of the best width, with room for more steps."""
        width, _ = self._branches.best(self._costs, self._steps)
        self._branches, row, column = self._branches.arranged(width)
        done = self._branches.done
        self._cache.rearrange(row, column, room=width * min(self._steps - done, max(_FIRST_ROOM, done)))
        columns = self._cache.columns + self._cache.room
        self._visible = self._branches.visible(columns, self._cache.dtype)
        self._key_positions = self._branches.positions(columns)
        self._wasteful = False

    def _masks(self, position: Tensor) -> dict[str, Tensor]:
        """Kind of layer -> [R, 1, S, T], when the slots of row r are at position[r]."""
        end = self._cache.columns + self._branches.width
        visible = self._visible[..., :end]
        query, keys = position[:, None, None, None], self._key_positions[:, None, None, :end]
        return {kind: self._limited(visible, query, keys, layer) for kind, layer in self._decoder.layers.items()}

    def _limited(self, visible: Tensor, query: Tensor, keys: Tensor, layer: LayerMask) -> Tensor:
        lowest = torch.finfo(visible.dtype).min
        if layer.window is not None and layer.window < self._longest:
            visible = visible.masked_fill(query - keys >= layer.window, lowest)
        if layer.chunk is not None and layer.chunk < self._longest:
            visible = visible.masked_fill(query // layer.chunk != keys // layer.chunk, lowest)
        return visible


def _chunks(prompts: Sequence[Sequence[int]], most: int) -> Iterator[Sequence[Sequence[int]]]:
    """Consecutive prompts of at most `most` tokens together (a longer one alone)."""
    first, used = 0, 0
    for i, prompt in enumerate(prompts):
        if i > first and used + len(prompt) > most:
            yield prompts[first:i]
            first, used = i, 0
        used += len(prompt)
    yield prompts[first:]
