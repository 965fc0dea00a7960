"""A policy by any name, ready to sample from: hub id, folder, GGUF file, adapter, checkpoint, run, `last`, `best`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alignment.chat import end_ids
from alignment.checkpoint_folder import MANIFEST
from alignment.export import generation_config, load_trained
from alignment.heads import Heads
from alignment.heads_file import FOLDER as HEADS
from alignment.heads_file import load_fused
from alignment.local_rollout import LocalRollout
from alignment.policy import LoRAConfig, PolicyConfig, base_model, load_policy, load_tokenizer, model_digest
from alignment.runs import named_checkpoint
from alignment.settings import as_config
from alignment.sources import adapter_config

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A model in eval mode, whose generation settings end a reply where it ends.

    Args:
        model: the transformers model, adapters merged. tokenizer: its own.
        name: for people; of a run the folder of its checkpoint. config: how it was loaded.
        heads: what changes its states or logits, if anything does.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    config: PolicyConfig
    heads: Heads | None = None

    def sampler(self, max_batch_tokens: int | None = None) -> LocalRollout:
        """What samples from it, ended by every id that ends a reply."""
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int), "load_tokenizer makes sure of a padding token"
        stop = end_ids(self.tokenizer, self.model.generation_config.eos_token_id)
        return LocalRollout(self.model, pad_id=pad, stop_ids=stop, max_batch_tokens=max_batch_tokens)

    def digest(self) -> str:
        """Of everything that its log-probs depend on. Reads every weight (`alignment.policy.model_digest`)."""
        body = model_digest(self.model, self.config)
        if self.heads is None:
            return body
        digest = hashlib.blake2b(f"{body} {self.heads.spec} {self.heads.preference}".encode(), digest_size=16)
        for name, value in sorted(self.heads.state_dict().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def ready(
    name: str,
    root: Path = Path("."),
    *,
    device: str | None = None,
    policy: Mapping[str, Any] | None = None,
) -> Ready:
    """Load it.

    Args:
        name: hub id, `tiny`, model folder (also one with heads, or an adapter), GGUF file, folder of a checkpoint or
            of a run, or last, best: of the newest run below `root` that has one.
        device: default cuda where there is one.
        policy: of a model by name, settings of `alignment.policy.PolicyConfig` as for a run, with its defaults; what is
            trained says itself how it is loaded. None: the same, in the number format of its weights.

    Raises UserError for a name that is none of these, CheckpointError for a damaged checkpoint.
    """
    settings = {key: value for key, value in (policy or {}).items() if key != "name"}
    trusted = bool(settings.get("trust_remote_code", False))
    folder = Path(name).expanduser()
    heads = None
    if (place := _checkpoint(name, folder, root)) is not None:
        _tell_unused(settings, "a checkpoint")
        model, tokenizer, config, heads = load_trained(place, trust_remote_code=trusted)
        name = str(place)
    elif (folder / HEADS / "config.json").is_file():
        _tell_unused(settings, "a model with heads")
        model, heads = load_fused(folder)
        config = PolicyConfig(name=name)
        tokenizer = load_tokenizer(config)
    else:
        config = _config(name, folder, {"dtype": "auto"} if policy is None else settings)
        loaded = load_policy(config)
        # A quantised model would be rounded once more; without merging it is the same.
        merged = isinstance(loaded, PeftModel) and config.quantization == "none"
        whole = loaded.merge_and_unload() if merged else loaded  # type: ignore[operator]  # of peft
        model = base_model(whole)
        tokenizer = load_tokenizer(config)
    model.generation_config = generation_config(model, tokenizer)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model.eval()  # type: ignore[no-untyped-call]
    nn.Module.to(model, where)
    if heads is not None:
        heads.to(where)
    return Ready(model=model, tokenizer=tokenizer, name=name, config=config, heads=heads)


def _checkpoint(name: str, folder: Path, root: Path) -> Path | None:
    """The folder of the checkpoint, or of the run, that a name means; None where it is the name of a model."""
    if name in ("last", "best"):
        return named_checkpoint(name, root, {})
    return folder if any((folder / mark).exists() for mark in (MANIFEST, "checkpoints")) else None


def _tell_unused(settings: Mapping[str, Any], what: str) -> None:
    if unused := sorted(settings.keys() - {"trust_remote_code"}):
        log.warning("policy.%s: not used, %s says itself how it is loaded", ", policy.".join(unused), what)


def _config(name: str, folder: Path, settings: Mapping[str, Any]) -> PolicyConfig:
    if not (folder / "adapter_config.json").is_file():
        return as_config(PolicyConfig, {**settings, "name": name})
    base = str(adapter_config(folder).base_model_name_or_path)
    return as_config(PolicyConfig, {**settings, "name": base, "lora": LoRAConfig(pretrained=str(folder))})
