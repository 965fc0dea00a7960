"""`torch.compile` for a policy: where it is put, where it is left out, and whether it works on this machine.

Each decoder layer is compiled, in place: names of weights stay, one compilation serves all layers, and what is
particular to a run (masks, packing, heads, the LM head's tiles) stays outside. Sizes are dynamic from the first step
on, since no two batches have the same. Rollouts and the checks at the start run the layers as they are: a cache that
grows by a column a step, and shapes that occur once, would be compiled again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from transformers.modeling_layers import GradientCheckpointingLayer

from alignment.errors import UserError
from alignment.prefix_attention import keep_out_of_graphs

# Variants of a layer before it is given up and runs as it is: with and without gradients, adapters, a window, more than
# one row, and their combinations. Torch's own limit is 8.
_VARIANTS = 32

# Devices without a backward of FlexAttention in torch 2.13.
_FLEX_FORWARD_ONLY = ("cpu", "mps")


def compile_layers(model: nn.Module) -> nn.Module:
    """The model, with its decoder layers compiled in place. Raises UserError where no layer can be told."""
    _configure()
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"policy.compile: cannot tell the layers of {type(model).__name__}; set it to false")
    keep_out_of_graphs()
    for layer in layers:
        layer.compile(dynamic=True)
    return model


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside the block the parts of the model run as they are, and nothing of them is compiled."""
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def check_compiler(device: torch.device, setting: str) -> None:
    """Raise UserError, with the name of the setting that needs it, unless torch.compile works for this device."""
    _configure()
    try:
        torch.compile(_twice)(torch.ones(2, device=device))
    except RuntimeError as error:  # every error of dynamo and inductor is one
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"{setting} needs torch.compile, which does not work here for {device.type}: {reason}"
        ) from error


def check_attention(attention: str, device: torch.device, *, training: bool) -> None:
    """Raise UserError for an attention that torch cannot run, or not train, on this device."""
    if attention != "flex_attention":
        return
    if training and device.type in _FLEX_FORWARD_ONLY:
        raise UserError(
            f"policy.attention=flex_attention cannot be trained on {device.type}, for which torch has no backward of "
            "it; use sdpa"
        )
    check_compiler(device, "policy.attention=flex_attention")


def _configure() -> None:
    """Torch's compiler as updates here need it, whoever calls it."""
    # It would cut graphs where DDP reduces gradients, which fails on FlexAttention; `alignment.update` reduces later.
    dynamo.optimize_ddp = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)


def _twice(x: Tensor) -> Tensor:
    return x + x
