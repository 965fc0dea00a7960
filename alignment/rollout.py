"""What a rollout is: prompts in, sampled completions out, with the sampler's log-probs and the version of its weights.

Engines: `alignment.local_rollout.LocalRollout` samples from the trained model itself, in process;
`alignment.vllm_rollout.VLLMRollout` asks a running vLLM server.

A completion is a pure function of the weights, the sampling settings and (seed, step, prompt index, completion number):
which prompts are sampled together, on how many ranks, and in how many micro-batches does not enter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedTokenizerBase

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.randomness import derive

SAMPLER_LOGPS = "sampler_logps"
"""Name of the sampler's log-probs among a rollout's token tensors."""


@dataclass(kw_only=True)
class SamplingConfig:
    """How completions are drawn. The filters apply in the order temperature, top_k, top_p, min_p, as in transformers.

    Args:
        max_tokens: most tokens of a completion, the stop token included.
        min_tokens: fewest tokens before a stop token may be drawn.
        temperature: logits are divided by it; 0 takes the likeliest token, which nothing can be learned from.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens until their probabilities reach this sum; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0 drops none.
        stop_ids: token ids that end a completion. Null: every end-of-text id of the tokenizer and of the model's
            generation config.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"sampling.max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise UserError(
                f"sampling.min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.stop_ids is not None and min(self.stop_ids, default=0) < 0:
            raise UserError(f"sampling.stop_ids holds {min(self.stop_ids)}; token ids are at least 0")
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"sampling.temperature must be 0 (greedy) or above, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"sampling.top_k must be 0 (all tokens) or above, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"sampling.top_p must be above 0 and at most 1 (all tokens), got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"sampling.min_p must be between 0 (all tokens) and 1, got {self.min_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def score_temperature(self) -> float:
        """The temperature of the stored log-probs, and of training on them: the sampling one, or 1 for greedy."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Sampled completions of P prompts, n for each, in the order of the prompts.

    Args:
        batch: every completion token is scored; columns and dataset positions are those of the prompts.
            `batch.tokens["sampler_logps"]` is [C] fp32, the log-prob of each token under the model that drew it, at
            `SamplingConfig.score_temperature` and over the whole vocabulary: before top_k, top_p, min_p and min_tokens
            remove tokens. Training recomputes exactly this, so that old and new log-probs agree on the first pass.
        truncated: [N] bool, ended by `max_tokens` and not by a stop token.
        weight_version: of the weights that drew the completions.
    """

    batch: GroupBatch
    truncated: Tensor
    weight_version: int

    @property
    def sampler_logps(self) -> Tensor:
        """[C] fp32 log-probs under the sampler."""
        return self.batch.tokens[SAMPLER_LOGPS]


class RolloutEngine(Protocol):
    """Where completions come from."""

    def generate(
        self,
        prompts: Sequence[Group],
        n: int,
        sampling: SamplingConfig,
        *,
        seed: int,
        step: int,
        earlier: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample n completions for each prompt (a Group; completions it may have are ignored); see `completion_keys`
        for the other arguments."""
        ...

    def sync(self, model: nn.Module, version: int) -> None:
        """Make the engine sample from the weights of `model`, from now on called `version`."""
        ...


class RolloutStopped(Exception):
    """The rollout was asked to stop before it finished; nothing of it is kept."""


# ------------------------------------------------------------------------------------------------ keys and stop tokens


def stop_ids_of(
    tokenizer: PreTrainedTokenizerBase, model: nn.Module | None = None, extra: Iterable[int] = ()
) -> list[int]:
    """Every id that ends a text: the tokenizer's, those of the model's generation config, and `extra`; ascending.

    `extra` is the place for a chat template's end of turn, which is often not the tokenizer's end of text.
    """
    found: set[int] = set(extra)
    models = [] if model is None else [m for m in model.modules() if isinstance(m, GenerationMixin)]
    configs = [m.generation_config for m in models if m.generation_config is not None]
    for ids in (tokenizer.eos_token_id, *(config.eos_token_id for config in configs)):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)


def completion_keys(
    prompts: Sequence[Group], n: int, seed: int, step: int, earlier: Sequence[int] | None = None
) -> list[list[int]]:
    """P lists of n 63-bit keys, one per completion: a function of (seed, step, prompt index, completion number).

    A prompt without an index is known by its content. The same prompt twice continues the numbers of its completions,
    so that it is not answered twice with the same words.

    Args:
        earlier: [P] how often each prompt stands before it in the batch of all ranks. None: in `prompts`.
    """
    names = [_name(prompt) for prompt in prompts]
    before = _repeats(names) if earlier is None else earlier
    return [
        [derive(seed, "completion", step, name, times * n + i) for i in range(n)]
        for name, times in zip(names, before, strict=True)
    ]


def times_before(prompts: Sequence[Group]) -> list[int]:
    """[P] how often each of this rank's prompts stands before it in the batch of all ranks, of which rank r holds every
    w-th from the r-th on. A collective."""
    parts: Any = distributed.all_gather_objects([_name(prompt) for prompt in prompts])
    seats = sorted((place, rank, name) for rank, names in enumerate(parts) for place, name in enumerate(names))
    counted = zip(seats, _repeats([name for *_, name in seats]), strict=True)
    return [times for (_, rank, _), times in counted if rank == distributed.rank()]


def _name(prompt: Group) -> str:
    return str(prompt.index) if prompt.index >= 0 else f"content {replace(prompt, completions=()).key}"


def _repeats(names: Sequence[str]) -> list[int]:
    """How often each name stands before it."""
    seen: Counter[str] = Counter()
    out = []
    for name in names:
        out.append(seen[name])
        seen[name] += 1
    return out


def assemble(
    prompts: Sequence[Group],
    completions: Sequence[Sequence[Sequence[int]]],
    logps: Tensor,
    truncated: Tensor,
    version: int,
    device: torch.device | str,
) -> Rollout:
    """Put sampled tokens together: `completions[p][i]` are the ids of completion i of prompt p, `logps` is [C]."""
    groups = [
        Group(prompt=p.prompt, completions=c, columns=p.columns, index=p.index)
        for p, c in zip(prompts, completions, strict=True)
    ]
    batch = GroupBatch.from_groups(groups).to(device)
    batch = batch.with_tokens(**{SAMPLER_LOGPS: logps.to(device, torch.float32)})
    return Rollout(batch=batch, truncated=truncated.to(device), weight_version=version)
