"""Answers of a model that stands still: a hub id, a folder, a GGUF file, a checkpoint, or a run's last checkpoint.

Sampling is that of training (`alignment.local_rollout`): an answer depends on the weights, the settings and the keys of
its draw alone, not on which prompts are answered together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from alignment import runs
from alignment.augmentation.paraphrase import Answer
from alignment.batches import Group
from alignment.chat import ChatEncoder, Message, TemplateRefused, end_ids
from alignment.checkpoint_folder import MANIFEST
from alignment.errors import UserError
from alignment.export import load_trained
from alignment.local_rollout import LocalRollout
from alignment.policy import PolicyConfig, base_model, load_policy, load_tokenizer, model_digest
from alignment.rewards.protocol import Texts
from alignment.rollout import Rollout, SamplingConfig
from alignment.settings import as_config

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Prompts whose answers are sampled together: bounds memory, changes no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model with its tokenizer.

    Args:
        name: for people. digest: of everything its log-probs depend on (`alignment.policy.model_digest`).
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    name: str
    digest: str


def load(name: str, policy: Mapping[str, Any] | None = None, root: Path = Path(".")) -> Loaded:
    """The model behind a name, on a GPU where there is one.

    Args:
        name: a hub id, a model folder, a GGUF file, a checkpoint's or a run's folder, or `last` or `best`: of the
            newest run that has such a checkpoint.
        policy: other settings of `alignment.policy.PolicyConfig`, for a model by name; a checkpoint has its own.
        root: folder that holds `runs`.

    Raises UserError where there is no such model, and for a policy with heads.
    """
    settings = {key: value for key, value in (policy or {}).items() if key != "name"}
    checkpoint = _checkpoint(name, root)
    if checkpoint is None:
        config = as_config(PolicyConfig, {**settings, "name": name})
        model, tokenizer = load_policy(config), load_tokenizer(config)
    else:
        if other := sorted(settings.keys() - {"trust_remote_code"}):
            log.warning("policy.%s: not used, a checkpoint says itself how it is loaded", ", policy.".join(other))
        trusted = bool(settings.get("trust_remote_code", False))
        model, tokenizer, config = load_trained(checkpoint, trust_remote_code=trusted, may_have_heads=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    shown = name if checkpoint is None else str(checkpoint)
    return Loaded(model=model, tokenizer=tokenizer, name=shown, digest=model_digest(model, config))


def _checkpoint(name: str, root: Path) -> Path | None:
    """The folder of the checkpoint, or of the run, that a name means; None where it is the name of a model."""
    if name in ("last", "best"):
        found = runs.find_checkpoint(name, root, None)
        if found is None:
            raise UserError(f"no run below {root / 'runs'} has a {name} checkpoint; give a model or a checkpoint")
        return found.checkpoint
    path = Path(name).expanduser()
    return path if (path / MANIFEST).is_file() or (path / "checkpoints").is_dir() else None


class Generator:
    """Samples answers to prompts.

    Args:
        loaded: the model.
        max_prompt_tokens: longer prompts are cut on the left, as in training. None: they are not.
    """

    def __init__(self, loaded: Loaded, max_prompt_tokens: int | None = None) -> None:
        self.tokenizer = loaded.tokenizer
        self._encoder = ChatEncoder(tokenizer=loaded.tokenizer, max_prompt_tokens=max_prompt_tokens)
        inner = base_model(loaded.model)
        settings = inner.generation_config
        stop = end_ids(self.tokenizer, inner.config.eos_token_id, settings.eos_token_id if settings else None)
        self._engine = LocalRollout(loaded.model, pad_id=cast(int, self.tokenizer.pad_token_id), stop_ids=stop)
        positions = getattr(inner.config.get_text_config(decoder=True), "max_position_embeddings", None)
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
