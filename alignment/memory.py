"""How much memory a run will need, from the model's configuration alone, beside what the machine has.

The parameters are counted on the meta device: nothing is downloaded but a config.json, nothing is allocated. With

    b  bytes of a value in the policy's dtype      H  hidden size            I  MLP size times active experts
    A  heads times head size                       T  tokens in one forward  W  tokens in one row of it (<= T)

weights      b a parameter; 4-bit linear layers 0.516 bytes (nf4 and its scales), 8-bit ones 1 byte and 4 a row
gradients    b a trainable parameter, K + 1 times where gradients of K rewards are combined
optimizer    AdamW two values a trainable parameter; 8-bit kinds one byte for each, with a scale every 256 values
reference    a copy: the weights again; a frozen adapter: the adapter again; adapter_off and cached: nothing here; fp8:
             a byte a weight and 4 a tensor, vectors as they are, and the weights of the largest layer and of what is
             in none, which are de-quantised at a time. One that follows the policy by a share below 1: 4 more bytes for
             each trained value below fp32
critic       an fp32 head and 4 T H of states for it; with a trunk of its own (the policy's or the reward model's, both
             without LM head) its weights, gradients, optimizer, and activations, which are kept beside the policy's
activations  T b (6 H + 4 A + 4 I) a layer: what a pre-norm gated-MLP block keeps for its backward pass (8 H below
             fp32, where norms keep fp32 values), and T b W where attention needs masks; 3 T b H after the last. With
             LoRA 4 H in place of 6 or 8; adapters are fp32, so below that T (4 (5 H + A + I) - b I) more for the copies
             of their inputs. With gradient checkpointing T b H a layer and one whole layer. The plain log-prob path
             adds T V (b + 8) for its logits.
logits       T V b, but nothing beyond 128 MiB: what the LM head of the shared path keeps for its backward pass

Activations are those of the usual architecture, measured on Llama, and logits the most there can be; the others are
exact to a few hundred bytes a tensor. Not counted: the framework itself, buffers of gradient reduction, fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from alignment.causal_lm import decoder_of
from alignment.critic import CriticConfig, reward_dtype, split_classifier, zero_head
from alignment.lm_head import KEPT_BYTES
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig, add_lora, base_model, load_architecture
from alignment.sources import adapter_config, loading, locate, locate_adapter
from alignment.swapping import decoder_layers

ResolvedReference = Literal["none", "cached", "adapter_off", "frozen_adapter", "copy", "fp8"]

EIGHT_BIT_MINIMUM = 4096
"""Smaller tensors keep their bitsandbytes optimizer state in 32 bits."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides the memory of a run.

    Args:
        policy: the model and its form.
        optim: the optimizer; None for a run that trains nothing.
        micro_batch_tokens: tokens in one forward.
        reference: kind of reference, resolved.
        reference_alpha: share of the policy that the reference takes over when it follows; None: it stays.
        row_tokens: tokens in the longest row, if the data has a limit; None assumes one row of all tokens.
        critic: what estimates values; None for an algorithm without.
        gradients: how many of each parameter are kept at once.
        masks: attention takes a mask over whole rows, and not groups one by one (`alignment.prefix_attention`).
    """

    policy: PolicyConfig
    optim: OptimConfig | None = field(default_factory=OptimConfig)
    micro_batch_tokens: int = 4096
    reference: ResolvedReference = "none"
    reference_alpha: float | None = None
    row_tokens: int | None = None
    critic: CriticConfig | None = None
    gradients: int = 1
    masks: bool = True


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes, for each process. Parameters (numbers) and all but the last two are those of the policy."""

    parameters: int
    trainable: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    reference: int
    critic: int

    @property
    def total(self) -> int:
        passes = self.activations + self.logits
        return self.weights + self.gradients + self.optimizer + passes + self.reference + self.critic


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What the shapes of a policy say: bytes of a value of its own weights, of its FP8 codes in use, and every trained
    tensor."""

    parameters: int
    weights: int
    value_bytes: int
    archived: int
    trained: tuple[nn.Parameter, ...]


class Estimator:
    """Estimates plans of one architecture; policies that differ in nothing that is counted are counted once."""

    def __init__(self, architecture: PreTrainedConfig) -> None:
        self._architecture = architecture
        self._counts: dict[str, _Counts] = {}
        self._critics: dict[str, tuple[nn.Module | None, nn.Linear]] = {}

    def __call__(self, plan: Plan) -> Estimate:
        """The estimate of a plan."""
        counts = self._count(replace(plan.policy, gradient_checkpointing=False))
        trained = counts.trained if plan.optim is not None else ()
        gradients = plan.gradients * sum(p.nbytes for p in trained)
        adapter = sum(p.nbytes for p in counts.trained) if plan.policy.lora is not None else 0
        return Estimate(
            parameters=counts.parameters,
            trainable=sum(p.numel() for p in trained),
            weights=counts.weights,
            gradients=gradients,
            optimizer=sum(_state_bytes(p, plan.optim) for p in trained if plan.optim is not None),
            activations=_activation_bytes(plan, self._architecture, counts.value_bytes),
            logits=_logit_bytes(plan, self._architecture, counts.value_bytes),
            reference={"copy": counts.weights, "frozen_adapter": adapter, "fp8": counts.archived}.get(plan.reference, 0)
            + _average_bytes(plan, counts.trained),
            critic=self._critic_bytes(plan, plan.critic) if plan.critic is not None else 0,
        )

    def _count(self, config: PolicyConfig) -> _Counts:
        key = repr(config)
        if key not in self._counts:
            self._counts[key] = _counts_of(_on_meta(config, self._architecture), config)
        return self._counts[key]

    def _critic_bytes(self, plan: Plan, critic: CriticConfig) -> int:
        """Everything a critic adds: weights, gradients, optimizer state and activations."""
        form = replace(plan.policy, gradient_checkpointing=False)
        if critic.kind == "reward_model":
            form = replace(form, lora=None, quantization="none")
        key = f"{form!r} {critic!r}"
        if key not in self._critics:
            self._critics[key] = _critic_on_meta(form, critic, self._architecture)
        trunk, head = self._critics[key]
        weights, trained = sum(p.nbytes for p in head.parameters()), tuple(head.parameters())
        activations = 4 * plan.micro_batch_tokens * head.in_features
        if trunk is not None:
            counts = _counts_of(trunk, form)
            weights, trained = weights + counts.weights, trained + counts.trained
            # No logits on either path: the trunk is asked for states.
            own = replace(form, gradient_checkpointing=plan.policy.gradient_checkpointing, logprob_path="shared")
            activations += _activation_bytes(replace(plan, policy=own), base_model(trunk).config, counts.value_bytes)
        if plan.optim is None:
            return weights
        return weights + activations + sum(p.nbytes + _state_bytes(p, plan.optim) for p in trained)


def estimate(plan: Plan) -> Estimate:
    """The estimate of a plan, from its policy's configuration."""
    return Estimator(load_architecture(plan.policy))(plan)


def _on_meta(config: PolicyConfig, architecture: PreTrainedConfig) -> nn.Module:
    """The model without its weights: shapes, dtypes and which parameters are trained."""
    dtype = config.torch_dtype or architecture.dtype or torch.float32
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            architecture, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
        if config.lora is None:
            return model
        if config.lora.pretrained is None:
            return add_lora(model, config.lora)
        from peft import get_peft_model  # here: see alignment.adapters

        settings = adapter_config(locate_adapter(config.lora.pretrained))
        settings.inference_mode = False
        return get_peft_model(model, settings)


def _critic_on_meta(
    config: PolicyConfig, critic: CriticConfig, architecture: PreTrainedConfig
) -> tuple[nn.Module | None, nn.Linear]:
    """A critic's own trunk (None: the policy's) and its fp32 head, without their weights."""
    if critic.reward_model is None:
        policy = base_model(_on_meta(config, architecture))
        with torch.device("meta"):
            head = zero_head(policy)
        return decoder_of(policy) if critic.kind == "copy" else None, head
    source = locate(critic.reward_model)
    with loading(f"reward model '{critic.reward_model}'"), torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(source.location),
            dtype=reward_dtype(config) or architecture.dtype or torch.float32,
        )
    trunk, head = split_classifier(classifier, critic.reward_model)
    return trunk, head.float()


def _counts_of(model: nn.Module, config: PolicyConfig) -> _Counts:
    return _Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        weights=sum(_weight_bytes(model, config)),
        value_bytes=next(p for n, p in model.named_parameters() if "lora_" not in n).element_size(),
        archived=_archived_bytes(model),
        trained=tuple(p for p in model.parameters() if p.requires_grad),
    )


def _weight_bytes(model: nn.Module, config: PolicyConfig) -> Iterator[int]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        quantised = (
            config.quantization != "none"
            and isinstance(module, nn.Linear | Conv1D)
            and "lora_" not in name
            and not name.endswith(("lm_head", "embed_out"))
        )
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not quantised or kind != "weight":
                yield parameter.nbytes
            elif config.quantization == "8bit":
                yield parameter.numel() + 4 * parameter.shape[0]
            else:
                blocks = math.ceil(parameter.numel() / 64)
                yield math.ceil(parameter.numel() / 2) + blocks + 4 * math.ceil(blocks / 256)


def _archived_bytes(model: nn.Module) -> int:
    """Codes and scales of a model (`alignment.fp8`), and what is de-quantised of it while it runs with them."""
    codes = sum(p.numel() + 4 if p.dim() > 1 else p.nbytes for p in model.parameters())
    layers = [list(layer.parameters()) for layer in decoder_layers(model)]
    inside = {id(p) for parameters in layers for p in parameters}
    outside = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    return codes + outside + max((sum(p.nbytes for p in parameters) for parameters in layers), default=0)


def _state_bytes(parameter: nn.Parameter, optim: OptimConfig) -> int:
    """Optimizer state of one trained tensor."""
    numel = parameter.numel()
    if optim.optimizer == "sgd":
        return parameter.nbytes if optim.betas and optim.betas[0] else 0
    if optim.optimizer == "adamw":
        return 2 * parameter.nbytes + 4  # and a step counter
    states = {"lion_8bit": 1, "ademamix_8bit": 3}.get(optim.optimizer, 2)
    if numel < EIGHT_BIT_MINIMUM:
        return states * 4 * numel
    return states * (numel + 4 * math.ceil(numel / 256))


def _average_bytes(plan: Plan, trained: tuple[nn.Parameter, ...]) -> int:
    """What `alignment.reference_sync` keeps beside the reference's own weights."""
    if plan.reference_alpha in (None, 1):
        return 0
    return sum(4 * p.numel() for p in trained if p.element_size() < 4)


def _activation_bytes(plan: Plan, architecture: PreTrainedConfig, b: int) -> int:
    """The largest sum of tensors kept for one backward pass, with values of `b` bytes. See the module's docstring."""
    if plan.optim is None:
        return 0
    text = architecture.get_text_config(decoder=True)
    tokens = plan.micro_batch_tokens
    row = min(plan.row_tokens or tokens, tokens)
    hidden = text.hidden_size
    # A recurrent model may have no attention at all.
    heads = getattr(text, "num_attention_heads", None)
    attention = heads * (getattr(text, "head_dim", None) or hidden // heads) if heads else 0
    # A dense configuration has no such fields, a mixture of experts has them beside or instead of the dense size.
    experts = getattr(text, "num_experts_per_tok", None) or 1
    widths = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * hidden
    mlp = experts * (max(widths) if isinstance(widths, list) else widths)  # some architectures give one a layer
    lora = plan.policy.lora is not None
    norms = (4 if lora else 6 if b == 4 else 8) * hidden
    layer = tokens * b * (norms + 4 * attention + 4 * mlp + (row if plan.masks else 0))
    if lora and b < 4:
        layer += tokens * (4 * (5 * hidden + attention + mlp) - b * mlp)
    layers = text.num_hidden_layers
    kept = layers * tokens * b * hidden + layer if plan.policy.gradient_checkpointing else layers * layer
    logits = tokens * text.vocab_size * (b + 8) if plan.policy.logprob_path == "plain" else 0
    return int(kept + 3 * tokens * b * hidden + logits)


def _logit_bytes(plan: Plan, architecture: PreTrainedConfig, b: int) -> int:
    """The most that the LM head keeps of its logits. Fewer tokens than in a forward are scored: those may fit."""
    if plan.optim is None or plan.policy.logprob_path == "plain":
        return 0
    return min(plan.micro_batch_tokens * int(architecture.get_text_config(decoder=True).vocab_size) * b, KEPT_BYTES)


# ------------------------------------------------------------------------------------------------------------- machine


def available(device: torch.device, processes: int = 1) -> int:
    """Bytes free for this process: of the GPU, or of main memory (within the container's limit) over `processes`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except FileNotFoundError:  # not in a container, or not on Linux
        return free // processes
    return min(free, int(limit) - int(used) if limit != "max" else free) // processes
