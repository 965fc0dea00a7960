"""Rollouts from the trained model itself, in this process.

Every prompt is read once; its completions share its cache (`alignment.shared_decoder`) or, for models that path does
not reproduce, a copy of the model's own cache (`alignment.decoding`); `verify()` decides, once, on the loaded
model. Finished completions leave the batch. The model samples in eval mode, whatever mode it is in: dropout would make
the sampler another policy than the one that is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.adapters import is_adapted
from alignment.batches import Group
from alignment.causal_lm import decoder_of, evaluating, is_low_precision
from alignment.compiled import uncompiled
from alignment.decoder_check import decoder_difference
from alignment.decoding import Decoder, PlainDecoder
from alignment.errors import UserError
from alignment.probe import Probe, obstacle
from alignment.rollout import Rollout, RolloutStopped, SamplingConfig, assemble, completion_keys
from alignment.sampling import draw
from alignment.sharding import unsharded
from alignment.shared_decoder import SharedDecoder

log = logging.getLogger(__name__)

# Decode steps between two looks at `should_stop`.
_POLL_EVERY = 8

# Logits computed at a time, bounds their memory (256 MiB in fp32).
_LOGITS = 1 << 26


@contextmanager
def _weights_cast_once(kind: str) -> Iterator[None]:
    """Under autocast, trained weights are cast for the whole block and not again in every decode step. They do not
    change meanwhile; Lightning switches this cache of torch's off, since they do later."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """Consecutive completions of one prompt that are decoded together: numbers `first` to `first + count - 1`."""

    prompt: int
    first: int
    count: int


class LocalRollout:
    """A RolloutEngine over a transformers causal language model, wrapped by peft or not.

    Args:
        model: the model; it is used as it is at each call, so `sync` only notes the version.
        pad_id: any token id; it fills, it never masks.
        stop_ids: ids that end a completion unless `SamplingConfig.stop_ids` says otherwise (`rollout.stop_ids_of`).
        max_batch_tokens: most tokens in the cache at once, prompts plus `max_tokens` for each completion; it bounds
            memory and changes no completion. A single completion is decoded even where it alone is over the bound.
            None: everything at once.
        should_stop: asked before every few decode steps; when it says yes, `generate` raises RolloutStopped.
        path: "auto" takes the shared path where it reproduces the model; "shared" makes it an error when it does not.

    Attributes:
        path: the path in force, "shared" or "plain". reason: why plain, "" on the shared path.

    Raises UserError for prompt tuning, for a model that neither path reproduces (at `verify`, or the first `generate`),
    and for path="shared" where that path does not.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_id: int,
        stop_ids: Sequence[int],
        max_batch_tokens: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        path: Literal["auto", "shared", "plain"] = "auto",
    ) -> None:
        inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        if inner is None:
            raise ValueError(f"{type(model).__name__} holds no transformers model")
        if is_adapted(model) and model.active_peft_config.is_prompt_learning:
            raise UserError("prompt and prefix tuning add tokens to the input; rollouts know LoRA only")
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise UserError(f"max_batch_tokens must be at least 1, got {max_batch_tokens}")
        self._model, self._inner, self._asked = model, inner, path
        self._config = inner.config.get_text_config(decoder=True)
        self._pad_id, self._stop_ids = pad_id, list(stop_ids)
        self._max_batch_tokens, self._should_stop = max_batch_tokens, should_stop
        self._decoder: Decoder | None = None
        self._version = 0
        self.path: Literal["shared", "plain"] = "plain"
        self.reason = "not verified yet"

    def sync(self, model: nn.Module, version: int) -> None:
        """Note the version of the weights, which need no copying. Raises ValueError for another model."""
        if model is not self._model:
            raise ValueError("LocalRollout samples from the model it was built with; build another for another model")
        self._version = version

    # ------------------------------------------------------------------ choosing the path

    def verify(self) -> None:
        """Decide `path` and `reason` on the loaded model; logs the outcome. Runs once, later calls return at once."""
        if self._decoder is not None:
            return
        name = type(self._inner).__name__
        probe = Probe(config=self._config, device=self._inner.device)
        shared, reason = self._shared_decoder(probe)
        if shared is None and self._asked == "shared":
            raise UserError(f"the shared rollout path does not fit {name}: {reason}; use path='auto'")
        if shared is not None:
            self._decoder, self.path, self.reason = shared, "shared", ""
            log.info("rollouts of %s share each prompt's cache", name)
            return
        self._decoder, self.path, self.reason = self._plain_decoder(probe, name), "plain", reason
        level = logging.INFO if self._asked == "plain" else logging.WARNING
        log.log(level, "rollouts of %s take the plain path: %s", name, reason)

    def _shared_decoder(self, probe: Probe) -> tuple[SharedDecoder | None, str]:
        if self._asked == "plain":
            return None, "it was asked for"
        if reason := obstacle(decoder_of(self._inner), None, self._config):
            return None, reason
        decoder = SharedDecoder(self._inner, self._pad_id)
        reason = self._check(decoder, probe)
        return (None if reason else decoder), reason

    def _plain_decoder(self, probe: Probe, name: str) -> PlainDecoder:
        try:
            decoder = PlainDecoder(self._inner)
        except ValueError as error:
            raise UserError(f"cannot sample from {name}: {error}") from error
        if reason := self._check(decoder, probe):
            raise UserError(f"cannot sample from {name}, whose cache does not reproduce its forward pass: {reason}")
        return decoder

    def _check(self, decoder: Decoder, probe: Probe) -> str:
        with self._sampling(), torch.autocast(probe.device.type, enabled=False):
            return decoder_difference(decoder, self._inner, probe, low_precision=is_low_precision(self._inner))

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """No gradients, eval mode, layers as they are, parameters whole: ranks decode different numbers of steps."""
        with torch.no_grad(), evaluating(self._model), uncompiled(self._model), unsharded(self._model):
            yield

    # ------------------------------------------------------------------ sampling

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
        """Sample n completions for each prompt; see `RolloutEngine`.

        Raises UserError for a prompt that leaves no room in the model's positions and for a stop id that is none of the
        model's, RolloutStopped when asked to stop.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.verify()
        self._check_lengths(prompts, sampling)
        if (largest := max(self._stops(sampling), default=0)) >= self._config.vocab_size:
            raise UserError(f"sampling.stop_ids holds {largest}; the model's ids end at {self._config.vocab_size - 1}")
        keys = torch.tensor(completion_keys(prompts, n, seed, step, earlier), dtype=torch.int64).view(len(prompts), n)
        tokens: list[list[list[int]]] = [[[] for _ in range(n)] for _ in prompts]
        logps: list[list[Tensor]] = [[torch.zeros(0)] * n for _ in prompts]
        truncated = torch.zeros(len(prompts), n, dtype=torch.bool)
        with self._sampling(), _weights_cast_once(self._inner.device.type):
            for wave in self._waves(prompts, n, sampling.max_tokens):
                ids, scores, lengths, cut = self._decode(prompts, wave, keys, sampling)
                row = 0
                for share in wave:
                    for number in range(share.first, share.first + share.count):
                        tokens[share.prompt][number] = ids[row, : lengths[row]].tolist()
                        logps[share.prompt][number] = scores[row, : lengths[row]]
                        truncated[share.prompt, number] = cut[row]
                        row += 1
        flat = torch.cat([torch.zeros(0), *(row for group in logps for row in group)])
        return assemble(prompts, tokens, flat, truncated.flatten(), self._version, self._inner.device)

    def _stops(self, sampling: SamplingConfig) -> list[int]:
        return self._stop_ids if sampling.stop_ids is None else sampling.stop_ids

    def _check_lengths(self, prompts: Sequence[Group], sampling: SamplingConfig) -> None:
        limit = getattr(self._config, "max_position_embeddings", None)
        for prompt in prompts:
            length = len(prompt.prompt)
            if not length:
                raise UserError(f"prompt {prompt.index} is empty; give it at least one token (for example BOS)")
            if limit is not None and length + sampling.max_tokens > limit:
                raise UserError(
                    f"prompt {prompt.index} has {length} tokens; with sampling.max_tokens {sampling.max_tokens} it "
                    f"passes the model's {limit} positions: lower sampling.max_tokens or shorten the prompts"
                )

    def _waves(self, prompts: Sequence[Group], n: int, max_tokens: int) -> Iterator[list[_Share]]:
        """Cut the work into sets that are decoded together, prompts of similar lengths in each."""
        assert self._decoder is not None
        bound = self._max_batch_tokens
        wave: list[_Share] = []
        used, length = 0, 0
        for p in sorted(range(len(prompts)), key=lambda p: (-len(prompts[p].prompt), p)):
            size = len(prompts[p].prompt)
            count = n if bound is None else min(n, max(1, (bound - size) // max_tokens))
            for first in range(0, n, count):
                share = _Share(prompt=p, first=first, count=min(count, n - first))
                cost = size + share.count * max_tokens
                full = bound is not None and used + cost > bound
                if wave and (full or (self._decoder.same_length and size != length)):
                    yield wave
                    wave, used = [], 0
                wave.append(share)
                used, length = used + cost, size
        if wave:
            yield wave

    def _decode(
        self, prompts: Sequence[Group], wave: Sequence[_Share], keys: Tensor, sampling: SamplingConfig
    ) -> tuple[Tensor, Tensor, list[int], Tensor]:
        """Sample one wave: ids and log-probs [rows, steps], lengths, and which were cut off [rows] bool; on the CPU."""
        assert self._decoder is not None
        device, most = self._inner.device, sampling.max_tokens
        stop = torch.tensor(self._stops(sampling), dtype=torch.int64, device=device)
        rows = torch.cat([keys[s.prompt, s.first : s.first + s.count] for s in wave]).to(device)
        ids = torch.zeros(len(rows), most, dtype=torch.int64, device=device)
        logps = torch.zeros(len(rows), most, device=device)
        lengths = torch.zeros(len(rows), dtype=torch.int64, device=device)
        live = torch.arange(len(rows), device=device)
        self._poll()
        decode = self._decoder.start([prompts[s.prompt].prompt for s in wave], [s.count for s in wave], most)
        x = decode.first
        for t in range(most):
            drawn, scores = self._draw(x, rows[live], t, sampling, stop if t < sampling.min_tokens else None)
            ids[live, t], logps[live, t], lengths[live] = drawn, scores.to(logps.dtype), t + 1
            going = ~torch.isin(drawn, stop)
            if t + 1 == most or not bool(going.any()):
                live = live[going]
                break
            if t % _POLL_EVERY == _POLL_EVERY - 1:
                self._poll()
            if not bool(going.all()):
                live, drawn = live[going], drawn[going]
                decode.keep(going)
            x = decode.step(drawn)
        cut = torch.zeros(len(rows), dtype=torch.bool, device=device)
        cut[live] = True
        return ids.cpu(), logps.cpu(), lengths.tolist(), cut.cpu()

    def _draw(
        self, x: Tensor, keys: Tensor, position: int, sampling: SamplingConfig, banned: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert self._decoder is not None
        size = max(1, _LOGITS // self._config.vocab_size)
        drawn = [
            draw(self._decoder.logits(part), part_keys, position, sampling, banned)
            for part, part_keys in zip(torch.split(x, size), torch.split(keys, size), strict=True)
        ]
        ids, logps = zip(*drawn, strict=True)
        return torch.cat(ids), torch.cat(logps)

    def _poll(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise RolloutStopped("asked to stop during a rollout")
