"""What a rollout asks of a decoder, and the plain one: a model's own cache and no mask.

`PlainDecoder` is the path for models that `alignment.shared_decoder` cannot serve. Prompts that are decoded together
have equal lengths, so that nothing is padded and the model needs neither mask nor positions: recurrent layers, alibi
and attention kernels without masks all work, as far as transformers' own cache does. The cache grows by concatenation,
and prompts of different lengths are decoded one length after the other.

Legend: P, V as in `alignment.batches`; n live completions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import LongTensor, Tensor, nn
from transformers import DynamicCache, PreTrainedModel


class Decode(Protocol):
    """Completions in the making. What predicts a token is a row of anything that `Decoder.logits` understands.

    Attributes:
        first: [n, ...] what predicts the first token of each completion, prompt by prompt.
    """

    first: Tensor

    def step(self, tokens: Tensor) -> Tensor:
        """Read the next token of each live completion, ids [n]; returns what predicts the one after, [n, ...]."""
        ...

    def keep(self, alive: Tensor) -> None:
        """Drop the completions that have ended: [n] bool, at least one true."""
        ...


class Decoder(Protocol):
    """A model prepared for decoding. `same_length`: prompts decoded together must have equal lengths."""

    same_length: bool

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], steps: int) -> Decode:
        """Read P prompts and open counts[p] completions of at most `steps` tokens for each."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """[n, V] in fp32 (fp64 for a float64 model), free to be overwritten."""
        ...


def cache_argument(module: nn.Module) -> str:
    """The name under which a model takes its cache, which has changed between transformers releases.

    Raises ValueError for a model that takes none.
    """
    parameters = inspect.signature(type(module).forward).parameters
    found = [name for name in ("cache", "past_key_values", "cache_params") if name in parameters]
    if not found:
        raise ValueError(f"{type(module).__name__} takes no cache")
    return found[0]


class PlainDecoder:
    """See the module docstring. Raises ValueError for a model that takes no cache."""

    same_length = True

    def __init__(self, inner: PreTrainedModel) -> None:
        self._inner, self._cache_name = inner, cache_argument(inner)
        keeps = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}

    def start(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], steps: int) -> Decode:
        return _PlainDecode(self, prompts, counts)

    def logits(self, rows: Tensor) -> Tensor:
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def read(self, input_ids: Tensor, cache: DynamicCache) -> Tensor:
        """[n, tokens] -> logits [n, V] after the last token."""
        options = {**self._options, self._cache_name: cache}
        logits: Tensor = self._inner(input_ids=input_ids, use_cache=True, **options).logits
        return logits[:, -1]

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._inner.config)

    @property
    def device(self) -> torch.device:
        return self._inner.device


class _PlainDecode:
    def __init__(self, decoder: PlainDecoder, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        self._decoder, self._cache = decoder, decoder.new_cache()
        logits = decoder.read(torch.tensor([list(p) for p in prompts], device=decoder.device), self._cache)
        order = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)).to(decoder.device)
        self._pick(order)
        self.first = logits[order]

    def step(self, tokens: Tensor) -> Tensor:
        return self._decoder.read(tokens[:, None], self._cache)

    def keep(self, alive: Tensor) -> None:
        self._pick(alive.nonzero()[:, 0])

    def _pick(self, rows: Tensor) -> None:
        """Every kind of cache layer can take rows in any order, and any number of times: beam search needs it."""
        self._cache.reorder_cache(cast(LongTensor, rows))
