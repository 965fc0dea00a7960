"""What there is to know of a transformers model whatever its architecture: its parts, its number format, how its logits
come about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from alignment.float8 import has_float8
from alignment.lm_head import LogitForm


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part below the LM head, which maps token ids to final hidden states."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    if decoder is model:  # where transformers' own look-up does not know the architecture's name for it
        decoder = next((m for m in model.children() if isinstance(m, PreTrainedModel)), model)
    if decoder is model:
        raise ValueError(f"cannot tell the decoder of {type(model).__name__} from its LM head")
    return decoder


def is_low_precision(model: PreTrainedModel) -> bool:
    if model.dtype == torch.float64:
        return False
    rounded = model.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    return rounded or getattr(model, "quantization_method", None) is not None or has_float8(model)


def logit_form(config: PreTrainedConfig) -> LogitForm:
    """From the names the transformers architectures use; one that does otherwise is caught by `verify()`."""
    scale = getattr(config, "logit_scale", None) or 1.0
    return LogitForm(
        scale=float(scale) / float(getattr(config, "logits_scaling", None) or 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for the block, then every module back in its own mode.

    Linear layers stay as they are: they do the same in both modes, except that 4-bit ones of bitsandbytes on a CPU
    repack their weights for good when they run in eval mode.
    """
    modes = [(m, m.training) for m in model.modules() if not isinstance(m, nn.Linear)]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
