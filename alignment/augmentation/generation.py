"""Answers of a model that stands still.

Sampling is that of training (`alignment.local_rollout`): an answer depends on the weights, the settings and the keys of
its draw alone, not on which prompts are answered together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alignment.augmentation.paraphrase import Answer
from alignment.batches import Group
from alignment.chat import ChatEncoder, Message, TemplateRefused
from alignment.ready import Ready
from alignment.rewards.protocol import Texts
from alignment.rollout import Rollout, SamplingConfig

AT_ONCE = 16
"""Prompts whose answers are sampled together: bounds memory, changes no answer."""


class Generator:
    """Samples answers to prompts.

    Args:
        loaded: the model.
        max_prompt_tokens: longer prompts are cut on the left, as in training. None: they are not.
    """

    def __init__(self, loaded: Ready, max_prompt_tokens: int | None = None) -> None:
        self.tokenizer = loaded.tokenizer
        self._encoder = ChatEncoder(tokenizer=loaded.tokenizer, max_prompt_tokens=max_prompt_tokens)
        self._engine = loaded.sampler()
        positions = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._positions: int | None = positions

    def prompt(
        self,
        number: int,
        prompt: Sequence[Message] | str,
        *,
        raw: bool = False,
        columns: Mapping[str, Any] | None = None,
    ) -> Group:
        """A prompt to answer. `number` keys its draws; raw: a text to be continued. Raises TemplateRefused for messages
        that the chat template does not know what to do with."""
        encoded = self._encoder.encode(prompt, (), raw=raw)
        return Group(prompt=encoded.prompt, completions=(), columns=columns or {}, index=number)

    def fits(self, prompt: Group, sampling: SamplingConfig) -> bool:
        """Whether the model has positions for a prompt and an answer."""
        return self._positions is None or len(prompt.prompt) + sampling.max_tokens <= self._positions

    def sample(self, prompts: Sequence[Group], count: int, sampling: SamplingConfig, *, seed: int) -> Rollout:
        """`count` completions of each prompt, on the CPU."""
        found = self._engine.generate(prompts, count, sampling, seed=seed, step=0)
        return replace(found, batch=found.batch.to("cpu"), truncated=found.truncated.cpu())

    def answers(
        self, prompts: Mapping[int, str], count: int, sampling: SamplingConfig, *, seed: int
    ) -> dict[int, list[Answer]]:
        """`count` answers to each of some user's messages, by the number that keys their draws. A prompt that leaves no
        room for an answer, or that the chat template refuses, has none."""
        found: dict[int, list[Answer]] = {}
        groups: list[Group] = []
        for number, text in prompts.items():
            try:
                group = self.prompt(number, [Message("user", text)])
            except TemplateRefused:
                continue
            groups += [group] if self.fits(group, sampling) else []
        for first in range(0, len(groups), AT_ONCE):
            part = groups[first : first + AT_ONCE]
            rollout = self.sample(part, count, sampling, seed=seed)
            texts = Texts.decode(rollout.batch, self.tokenizer).completions
            pairs = [Answer(*pair) for pair in zip(texts, rollout.truncated.tolist(), strict=True)]
            for place, group in enumerate(part):
                found[group.index] = pairs[place * count : (place + 1) * count]
        return found
