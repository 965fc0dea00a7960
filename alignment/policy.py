"""Loading a policy: weights and tokenizer from a hub id, a folder, a GGUF file or nothing, then LoRA and the rest.

A loaded policy is deterministic given its configuration: from-scratch weights and new adapters are drawn from
`init_seed` without disturbing the global random state, and dropout is off unless asked for, so that the sampler and the
trainer see the same probabilities.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from alignment.compiled import compile_layers
from alignment.errors import UserError
from alignment.quantize import Quantization, bitsandbytes_config, keep_4bit_as_read
from alignment.sources import Source, adapter_config, loading, locate, locate_adapter
from alignment.spread import whole
from alignment.tiny import tiny_config, tiny_model, tiny_tokenizer
from alignment.transforms import Transforms, disable_dropout

__all__ = [
    "LoRAConfig",
    "PolicyConfig",
    "Transforms",
    "add_lora",
    "base_model",
    "check_vocabulary",
    "load_architecture",
    "load_policy",
    "load_tokenizer",
    "model_digest",
    "prepare",
]

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]


@dataclass(kw_only=True)
class LoRAConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): the base stays frozen, a product of two thin matrices is trained.

    Args:
        r: rank of the adapter, the width of its thin side.
        alpha: scale of the adapter's output; it is multiplied by alpha / r (alpha / sqrt(r) with `rslora`).
        dropout: probability of dropping an input of the adapter, 0 to 1. Above 0, sampling and training differ.
        target_modules: names of the linear layers to adapt, or `all-linear` for all but the output head.
        pretrained: folder or hub id of an adapter to continue from; it brings its own r, alpha and target_modules.
        rslora: scale by alpha / sqrt(r) (arXiv:2312.03732), which keeps high ranks learning.
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"
    pretrained: str | None = None
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UserError(f"lora.r must be at least 1, got {self.r}")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"lora.dropout is a probability below 1, got {self.dropout}")


@dataclass(kw_only=True)
class PolicyConfig:
    """Which model is trained, and in what form.

    Args:
        name: hub id, local folder, .gguf file (dequantised) or `tiny` (a 250,000-parameter Llama made on the spot).
        arch: an architecture to build from scratch instead of `name`: `model_type` and any field of its transformers
            configuration; vocabulary size and special tokens default to the tokenizer's.
        tokenizer: hub id or folder of another tokenizer than the policy's own. With `arch`, null means the tiny one.
        revision: branch, tag or commit of a hub id.
        dtype: number format of the weights; `auto` keeps the checkpoint's.
        attention: attention implementation of transformers; `flex_attention` trains on GPUs only (docs/performance.md).
        lora: train adapters instead of all weights; null trains all weights.
        quantization: keep the frozen base in 4 or 8 bits (bitsandbytes); needs `lora`.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        compile: run each decoder layer through torch.compile, in training and evaluation, not in rollouts. Needs a C++
            compiler on a CPU, Triton on a GPU; the first steps take longer.
        dropout: keep the dropout of the model's configuration. Off, every probability is set to 0.
        logprob_path: `shared` computes each prompt once for all its completions, `plain` pads rows; `auto` checks that
            both agree for this model and takes `shared` if they do.
        trust_remote_code: run Python code shipped with the model. Only the command line or your own file may set it.
        chat_template: Jinja chat template, or the path of a file with one, instead of the tokenizer's.
        init_seed: seed of from-scratch weights and of new adapters.
    """

    name: str = "tiny"
    arch: dict[str, Any] | None = None
    tokenizer: str | None = None
    revision: str | None = None
    dtype: DTypeName = "float32"
    attention: Attention = "sdpa"
    lora: LoRAConfig | None = None
    quantization: Quantization = "none"
    gradient_checkpointing: bool = False
    compile: bool = False
    dropout: bool = False
    logprob_path: Literal["auto", "shared", "plain"] = "auto"
    trust_remote_code: bool = False
    chat_template: str | None = None
    init_seed: int = 0

    def __post_init__(self) -> None:
        for field, kind in (("dtype", DTypeName), ("attention", Attention), ("quantization", Quantization)):
            value = getattr(self, field)
            if value not in get_args(kind):
                raise UserError(f"policy.{field} is one of {', '.join(get_args(kind))}; got '{value}'")
        if self.quantization != "none" and self.lora is None:
            raise UserError(f"policy.quantization={self.quantization} freezes the base: set policy.lora as well")
        if self.attention == "flex_attention" and self.dropout:
            raise UserError("policy.attention=flex_attention knows no dropout; set policy.dropout=false or use sdpa")
        if self.arch is not None and "model_type" not in self.arch:
            raise UserError("policy.arch needs model_type (for example llama, qwen3, gemma3_text)")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The weights' dtype; None for `auto`."""
        return None if self.dtype == "auto" else {d: getattr(torch, d) for d in get_args(DTypeName)[1:]}[self.dtype]

    @property
    def from_scratch(self) -> bool:
        """Whether no file holds the weights."""
        return self.arch is not None or self.name == "tiny"


# ----------------------------------------------------------------------------------------------------------- tokenizer


def load_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, with a padding token in every case.

    A missing padding token becomes the end-of-text token. Nothing is masked by its id (see `alignment.batches`), so
    this cannot hide an end of text from the loss. Raises UserError with the reason in one line.
    """
    tokenizer = _read_tokenizer(config)
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of '{config.name}' has no end-of-text token; set policy.tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        tokenizer.chat_template = _template_text(config.chat_template)
    return tokenizer


def _read_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    name = config.tokenizer or ("tiny" if config.arch is not None else config.name)
    if name == "tiny":
        return tiny_tokenizer()
    source = locate(name, weights=False)
    arguments = _hub_arguments(config, source)
    if config.tokenizer is not None:
        arguments.pop("revision", None)  # it belongs to the policy's repository
    with loading(f"the tokenizer '{name}'"):
        tokenizer = AutoTokenizer.from_pretrained(source.location, gguf_file=source.gguf_file, **arguments)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _template_text(template: str) -> str:
    """The template itself, or the content of the file it names (Jinja has braces, a path has none)."""
    if "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise UserError(f"policy.chat_template is neither Jinja text nor a file: '{template}'")
    return path.read_text(encoding="utf-8")


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError when the tokenizer can produce ids the model has no embedding for."""
    # The weight and not `num_embeddings`: an adapter may wrap the embedding.
    weight = base_model(model).get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    if len(tokenizer) > weight.shape[0]:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {weight.shape[0]}: "
            "they do not belong together; set policy.tokenizer"
        )


# --------------------------------------------------------------------------------------------------------------- model


def load_policy(config: PolicyConfig, transforms: Transforms | None = None) -> nn.Module:
    """Build the policy: a transformers causal LM, or a PeftModel around one; in training mode.

    Args:
        config: see PolicyConfig.
        transforms: further steps (float8, sharding) registered by callbacks; not changed.

    Raises:
        UserError: nothing loadable under that name, or settings that do not go together; one line.
    """
    steps = Transforms() if transforms is None else transforms.copy()
    lora = config.lora
    if config.quantization != "none":
        steps.register("quantise", lambda model: model)  # done while reading, so that the full weights never exist
    if lora is not None:
        steps.register("lora", lambda model: _add_lora(model, config, lora))
    return prepare(_load_base(config), config, steps)


def prepare(model: PreTrainedModel, config: PolicyConfig, transforms: Transforms) -> nn.Module:
    """A model as it was read, made fit for training: dropout off unless asked for, activations checkpointed if asked
    for, layers compiled if asked for, and `transforms`; in training mode."""
    steps = transforms.copy()
    if config.gradient_checkpointing:
        steps.register("activation_checkpointing", _checkpoint_activations)
    if config.compile:
        if "fully_shard" in steps.stages:
            raise UserError(
                "policy.compile does not go with callbacks.FSDP2, whose layers gather their parameters: set it to false"
            )
        steps.register("compile", compile_layers)
    if not config.dropout:
        disable_dropout(model)
    # transformers gives the embedding of the pad id no gradient. Where pad is also the end-of-text token, one of
    # the text's tokens would stay untrained; padded positions get no gradient anyway.
    embeddings = model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        embeddings.padding_idx = None
    return steps.apply(model).train()


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside: the model itself, or what an adapter, a compiler or a sharder wraps."""
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    assert inner is not None, f"no transformers model in {type(model).__name__}"
    return inner


def _load_base(config: PolicyConfig) -> PreTrainedModel:
    if config.from_scratch:
        model = _build_from_scratch(config)
        return _quantised_copy(model, config) if config.quantization != "none" else model
    source = locate(config.name)
    if source.gguf_file is None:
        return _read(source, config, quantization=config.quantization)
    model = _read(source, config, quantization="none")
    return _quantised_copy(model, config) if config.quantization != "none" else model


def _read(source: Source, config: PolicyConfig, *, quantization: Quantization) -> PreTrainedModel:
    arguments: dict[str, Any] = _hub_arguments(config, source)
    if source.gguf_file is not None:
        arguments |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    else:
        arguments["use_safetensors"] = True
    if quantization != "none":
        arguments["quantization_config"] = bitsandbytes_config(quantization, config.torch_dtype)
    dtype = config.torch_dtype or (torch.float32 if source.gguf_file is not None else "auto")
    with loading(f"the model '{config.name}'"):
        model = AutoModelForCausalLM.from_pretrained(
            source.location, dtype=dtype, attn_implementation=config.attention, **arguments
        )
    if model._hf_peft_config_loaded:
        raise UserError(f"'{config.name}' is an adapter: it goes to policy.lora.pretrained, its base to policy.name")
    assert isinstance(model, PreTrainedModel)
    keep_4bit_as_read(model)
    return model


def load_architecture(config: PolicyConfig) -> PreTrainedConfig:
    """The transformers configuration of the policy, without reading or making any weight."""
    if config.arch is not None:
        tokenizer = load_tokenizer(config)
        fields = {
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **config.arch,
        }
        with loading(f"an architecture of type '{fields['model_type']}'"):
            return AutoConfig.for_model(**fields)
    if config.name == "tiny":
        return tiny_config()
    source = locate(config.name)
    arguments = _hub_arguments(config, source)
    if source.gguf_file is not None:
        arguments["gguf_file"] = source.gguf_file
    with loading(f"the configuration of '{config.name}'"):
        architecture = AutoConfig.from_pretrained(source.location, **arguments)
    assert isinstance(architecture, PreTrainedConfig)
    return architecture


def _build_from_scratch(config: PolicyConfig) -> PreTrainedModel:
    dtype = config.torch_dtype or torch.float32
    if config.arch is None:
        model: PreTrainedModel = tiny_model(config.init_seed, dtype=dtype)
        with loading("the tiny model"):
            model.set_attn_implementation(config.attention)
        return model
    architecture = load_architecture(config)
    with loading(f"an architecture of type '{architecture.model_type}'"), _seeded(config.init_seed):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            architecture, dtype=torch.float32, attn_implementation=config.attention, trust_remote_code=False
        )
    check_vocabulary(model, load_tokenizer(config))
    nn.Module.to(model, dtype)
    return model


def _quantised_copy(model: PreTrainedModel, config: PolicyConfig) -> PreTrainedModel:
    """The same model in 4 or 8 bits. transformers quantises only while reading, so the weights go through a folder."""
    with tempfile.TemporaryDirectory() as folder:
        # Each rank has its own; transformers would have the first one write alone.
        model.should_save_on_this_rank = lambda is_main_process: True  # type: ignore[method-assign]
        model.save_pretrained(folder)
        return _read(Source(location=folder), config, quantization=config.quantization)


def _hub_arguments(config: PolicyConfig, source: Source) -> dict[str, Any]:
    arguments: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if not source.local and config.revision is not None:
        arguments["revision"] = config.revision
    return arguments


# ---------------------------------------------------------------------------------------------------------- transforms


def add_lora(model: nn.Module, lora: LoRAConfig) -> nn.Module:
    """`model` with new adapters: its own weights frozen, A random, B zero."""
    from peft import LoraConfig, get_peft_model  # here: see alignment.adapters

    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft says int and divides by r
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    assert isinstance(model, PreTrainedModel)
    return get_peft_model(model, settings)


def _add_lora(model: nn.Module, config: PolicyConfig, lora: LoRAConfig) -> nn.Module:
    from peft import PeftModel

    assert isinstance(model, PreTrainedModel)
    with loading(f"LoRA on '{config.name}'"), _seeded(config.init_seed):
        if lora.pretrained is None:
            return add_lora(model, lora)
        folder = locate_adapter(lora.pretrained)
        settings = adapter_config(folder)
        settings.inference_mode = False
        if not config.dropout:
            settings.lora_dropout = lora.dropout
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True, config=settings)


def _checkpoint_activations(model: nn.Module) -> nn.Module:
    # The non-reentrant kind works although a LoRA model's embedded inputs need no gradient.
    base_model(model).activation_checkpointing_enable({"use_reentrant": False})
    return model


# ----------------------------------------------------------------------------------------------------------- utilities


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw initial weights on the CPU from `seed` and leave every random state as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def model_digest(model: nn.Module, config: PolicyConfig) -> str:
    """Hash of everything a policy's log-probs depend on: architecture, quantisation and all weights.

    Equal content gives an equal digest wherever it was loaded from. Reads every weight: about a second a gigabyte. A
    collective for a sharded model.
    """
    settings = base_model(model).config.to_diff_dict()
    kept = {k: v for k, v in settings.items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([kept, config.quantization], sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(whole(value).detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
