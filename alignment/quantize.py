"""Bases in 4 or 8 bits, through bitsandbytes."""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig

Quantization = Literal["none", "4bit", "8bit"]


def bitsandbytes_config(quantization: Literal["4bit", "8bit"], dtype: torch.dtype | None) -> BitsAndBytesConfig:
    """What transformers needs to quantise while it reads.

    4 bits are nf4 with quantised block scales (QLoRA, arXiv:2305.14314), computing in `dtype`; 8 bits are rows of int8
    with outlier columns kept (LLM.int8(), arXiv:2208.07339).
    """
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype or torch.bfloat16,
    )


def keep_4bit_as_read(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights at the first inference on a CPU with AVX512-BF16.

    The repacked form rounds the scale of every block to bf16 and stays for training: one validation pass would change
    the model, and a resumed run would differ from an uninterrupted one.
    """
    if "bitsandbytes" not in sys.modules:  # then no layer is of its making; its import takes a second
        return
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
