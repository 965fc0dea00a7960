"""A trained policy as a plain transformers folder: `from_pretrained` loads it, `transformers serve` and vLLM serve it.

    alignment export CHECKPOINT OUT [--merge_lora false] [--weights '{kind: 2}'] [--force] [--trust_remote_code]

LoRA is merged into its base, or kept as an adapter folder beside which the base is needed. A base trained in 4 or 8
bits is merged in full precision: the adapter is added to the weights as they were before rounding, so the exported
model is close to the trained one, not bit-equal. Of a policy with heads the model is the trunk, and its heads are in a
folder beside it (`alignment.heads_file`).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from alignment.chat import end_ids
from alignment.checkpoint import checkpoint_of
from alignment.checkpoint_folder import load_checkpoint_folder
from alignment.errors import UserError
from alignment.fp8 import Fp8Archive
from alignment.heads import Heads, preference
from alignment.heads_file import HasHeads, SavedHeads, of_checkpoint, write_heads
from alignment.policy import PolicyConfig, base_model, load_policy, load_tokenizer
from alignment.settings import as_config
from alignment.sources import locate
from alignment.spread import whole
from alignment.training import STATE_KEY
from alignment.whole_file import sync

log = logging.getLogger(__name__)

ADAPTER = "default"
MARKS = ("config.json", "adapter_config.json")


class Exportable(Protocol):
    """A live module: what `PolicyMixin` offers."""

    policy: nn.Module
    policy_config: PolicyConfig

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A configuration and the weights that training left: all of them, or with LoRA at least the adapter's."""

    config: PolicyConfig
    tokenizer: PreTrainedTokenizerBase
    weights: Mapping[str, Tensor]
    heads: SavedHeads | None


def export(
    source: Exportable | str | Path,
    out: str | Path,
    *,
    merge_lora: bool = True,
    weights: Mapping[str, float] | None = None,
    archived: str | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write model, tokenizer (with chat template) and generation settings, and return the folder.

    Args:
        source: a module whose policy is loaded (called on every rank where it is sharded), a checkpoint folder, or a
            run's folder, whose last checkpoint it is.
        out: the new folder. It appears complete or not at all.
        merge_lora: add the adapter to the weights; otherwise write the adapter alone.
        weights: of a policy with heads, name -> preference to decode with; a reward that is not named keeps the share
            it has there.
        archived: of a checkpoint, the past policy of that name that `callbacks.Fp8PolicyArchive` has kept in it.
        force: replace an earlier export.
        trust_remote_code: run Python code shipped with the base model; a checkpoint cannot ask for it.

    Raises:
        UserError: `out` is taken, the adapter's base is not something `from_pretrained` can load, or weights that are
            no preference, or of a policy without heads.
        CheckpointError: the checkpoint is damaged.
    """
    out = Path(out)
    check_target(out, force)
    if isinstance(source, str | Path):
        trained = _from_checkpoint(Path(source), trust_remote_code, archived)
    elif archived is not None:
        raise UserError("archived policies of a live module are not exported by name; restore one, then export")
    else:
        trained = _from_live(source)
    heads = trained.heads if weights is None else _turned(trained.heads, weights)
    if trained.config.lora is not None and not merge_lora:
        model: PreTrainedModel | PeftModel = _adapter(trained)
    else:
        model = _merged(trained)
        model.generation_config = generation_config(model, trained.tokenizer)
    write_model(model, trained.tokenizer, out, heads)
    return out


def load_trained(
    path: str | Path, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PolicyConfig, Heads | None]:
    """The policy of a checkpoint, or of a run's last one, to sample from: in eval mode and full precision, LoRA merged,
    heads in it; its tokenizer; its configuration; and the heads, where it has some.

    Raises as `export` does.
    """
    trained = _from_checkpoint(Path(path), trust_remote_code, None)
    model = _merged(trained)
    model.eval()  # type: ignore[no-untyped-call]
    model.generation_config = generation_config(model, trained.tokenizer)
    heads = None
    if trained.heads is not None:
        heads = Heads(trained.heads.spec)
        heads.load_state_dict(dict(trained.heads.tensors))
        heads.to(model.device).attach(model)
    return model, trained.tokenizer, trained.config, heads


def generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The model's own, with every id that ends a reply: the model's, the tokenizer's, and the chat template's."""
    config = model.generation_config or GenerationConfig()  # type: ignore[no-untyped-call]
    config.eos_token_id = end_ids(tokenizer, config.eos_token_id, model.config.eos_token_id)
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    return config


# ------------------------------------------------------------------------------------------------------------- sources


def _from_live(module: Exportable) -> _Trained:
    config = module.policy_config
    heads = module.saved_heads() if isinstance(module, HasHeads) else None
    weights = {name: whole(value) for name, value in module.policy.state_dict().items()}
    return _Trained(config=config, tokenizer=module.tokenizer, weights=weights, heads=heads)


def _turned(heads: SavedHeads | None, weights: Mapping[str, float]) -> SavedHeads:
    """Heads with another preference."""
    if heads is None:
        raise UserError("weights are the preference of a policy with heads (modules.DecoupledPO); this one has none")
    shares = preference(dict(zip(heads.spec.names, heads.spec.weights, strict=True)), weights)
    return replace(heads, spec=replace(heads.spec, weights=shares))


def _from_checkpoint(path: Path, trust_remote_code: bool, archived: str | None) -> _Trained:
    path = checkpoint_of(path)
    checkpoint = load_checkpoint_folder(path)
    saved = checkpoint.get("hyper_parameters", {}).get("policy")
    if saved is None:
        raise UserError(f"checkpoint {path} holds no policy: its module has no hyper-parameter 'policy'")
    config = replace(as_config(PolicyConfig, saved), trust_remote_code=trust_remote_code)
    state: dict[str, Tensor] = checkpoint["state_dict"]
    if archived is not None:
        state = Fp8Archive.of_state(checkpoint).over(state, archived)
    weights = {n.removeprefix("policy."): v for n, v in state.items() if n.startswith("policy.")}
    heads = of_checkpoint(state, checkpoint.get(STATE_KEY, {}))
    kept = ("policy.",) if heads is None else ("policy.", "heads.")
    others = sorted(n for n in state if not n.startswith(kept))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        log.warning("left out of the export, which holds the policy alone: %s%s", ", ".join(others[:3]), more)
    return _Trained(config=config, tokenizer=load_tokenizer(config), weights=weights, heads=heads)


def _merged(trained: _Trained) -> PreTrainedModel:
    """A fresh model in full precision with the trained weights in it; the live one is left as it is."""
    config = replace(trained.config, quantization="none", gradient_checkpointing=False, compile=False)
    model = load_policy(config)
    _fill(model, trained.weights, adapter_only=config.lora is not None)
    if isinstance(model, PeftModel):
        merged = model.merge_and_unload(safe_merge=True)
        assert isinstance(merged, PreTrainedModel)
        return merged
    return base_model(model)


def _adapter(trained: _Trained) -> PeftModel:
    name = trained.config.name
    if trained.config.from_scratch or locate(name).gguf_file is not None:
        raise UserError(f"an adapter on '{name}' cannot be loaded by name; export it merged (--merge_lora true)")
    model = load_policy(replace(trained.config, gradient_checkpointing=False, compile=False))
    assert isinstance(model, PeftModel)
    _fill(model, trained.weights, adapter_only=True)
    source = locate(name)
    settings = model.peft_config[ADAPTER]
    settings.base_model_name_or_path = str(Path(source.location).resolve()) if source.local else source.location
    settings.revision = trained.config.revision
    return model


def _fill(model: nn.Module, weights: Mapping[str, Tensor], *, adapter_only: bool) -> None:
    """Copy trained weights in. Raises UserError unless all that training can have changed is there."""
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    wanted = trainable if adapter_only else set(model.state_dict())
    missing = sorted(wanted - set(weights))
    if missing:
        raise UserError(f"the checkpoint lacks {len(missing)} of the policy's weights, for example {missing[0]}")
    model.load_state_dict({n: weights[n] for n in wanted}, strict=False)


# -------------------------------------------------------------------------------------------------------------- folders


def check_target(out: Path, force: bool) -> None:
    """Raise UserError unless `out` is new, empty, or with `force` an earlier export."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"'{out}' exists and is not a folder")
    if not any(out.iterdir()):
        return
    if not force:
        raise UserError(f"'{out}' is not empty; choose another folder, or replace an earlier export with --force")
    if not any((out / mark).is_file() for mark in MARKS):
        raise UserError(f"'{out}' holds something else than an exported model; --force does not delete it")


def write_model(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    heads: SavedHeads | None = None,
) -> None:
    """Write a model's folder; see `appearing`."""
    with appearing(out) as partial:
        if isinstance(model, PeftModel):
            model.save_pretrained(str(partial), selected_adapters=[ADAPTER], save_embedding_layers=False)
        else:
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if heads is not None:
            write_heads(heads, partial)


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A path beside `out` to write a folder to; then it is flushed to the disk and renamed to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, previous = (out.parent / f".{out.name}.{role}-{os.getpid()}" for role in ("partial", "previous"))
    try:
        yield partial
        for file in partial.rglob("*"):
            sync(file)
        sync(partial)
        if out.exists():
            os.rename(out, previous)
        os.rename(partial, out)
        sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if previous.exists() and not out.exists():
            os.rename(previous, out)
        shutil.rmtree(previous, ignore_errors=True)
