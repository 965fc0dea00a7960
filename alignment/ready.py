"""A policy by any name, ready to sample from: hub id, folder, GGUF file, adapter, checkpoint, run, `last`, `best`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alignment.chat import end_ids
from alignment.export import generation_config, load_trained
from alignment.heads_file import FOLDER as HEADS
from alignment.heads_file import load_fused
from alignment.local_rollout import LocalRollout
from alignment.policy import LoRAConfig, PolicyConfig, base_model, load_policy, load_tokenizer
from alignment.runs import named_checkpoint
from alignment.sources import adapter_config

_CHECKPOINT = ("manifest.json", "checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A model in eval mode, whose generation settings end a reply where it ends, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def sampler(self, max_batch_tokens: int | None = None) -> LocalRollout:
        """What samples from it, ended by every id that ends a reply."""
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int), "load_tokenizer makes sure of a padding token"
        stop = end_ids(self.tokenizer, self.model.generation_config.eos_token_id)
        return LocalRollout(self.model, pad_id=pad, stop_ids=stop, max_batch_tokens=max_batch_tokens)


def ready(name: str, root: Path = Path("."), *, device: str | None = None, dtype: str = "auto") -> Ready:
    """Load it.

    Args:
        name: hub id, `tiny`, model folder (also one with heads, or an adapter), GGUF file, folder of a checkpoint or
            of a run, or last, best: of the newest run below `root` that has one.
        device: default cuda where there is one.
        dtype: of a model that is loaded by name; a checkpoint keeps its own.

    Raises UserError for a name that is none of these, CheckpointError for a damaged checkpoint.
    """
    folder = Path(name)
    if name in ("last", "best"):
        model, tokenizer, _ = load_trained(named_checkpoint(name, root, {}))
    elif any((folder / mark).exists() for mark in _CHECKPOINT):
        model, tokenizer, _ = load_trained(folder)
    elif (folder / HEADS / "config.json").is_file():
        model, _ = load_fused(folder)
        tokenizer = load_tokenizer(PolicyConfig(name=name))
    else:
        config = PolicyConfig(name=name, dtype=dtype)  # type: ignore[arg-type]  # checked there
        if (folder / "adapter_config.json").is_file():
            base = adapter_config(folder).base_model_name_or_path
            config = PolicyConfig(name=str(base), dtype=dtype, lora=LoRAConfig(pretrained=name))  # type: ignore[arg-type]
        loaded = load_policy(config)
        model = base_model(loaded.merge_and_unload() if isinstance(loaded, PeftModel) else loaded)
        tokenizer = load_tokenizer(config)
    model.generation_config = generation_config(model, tokenizer)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model.eval()  # type: ignore[no-untyped-call]
    return Ready(model=model.to(where), tokenizer=tokenizer)  # type: ignore[arg-type]

