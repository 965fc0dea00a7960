"""Keyed randomness: every draw is a pure function of (seed, purpose, keys), never of what was drawn before.

That is what makes an interrupted run equal an uninterrupted one, and a sample independent of how rows were batched.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def derive(seed: int, purpose: str, *keys: int | str) -> int:
    """A 63-bit seed from a base seed, the purpose of the draw and any keys (step, prompt, completion, rank)."""
    text = "\x1f".join([str(int(seed)), purpose, *(str(k) for k in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh torch generator for one keyed purpose."""
    import torch  # not above: reward workers import the built-in world, whose draws need none

    return torch.Generator(device=device).manual_seed(derive(seed, purpose, *keys))


def permutation(seed: int, epoch: int, size: int) -> Tensor:
    """[size] the data order of an epoch."""
    import torch

    return torch.randperm(size, generator=generator(seed, "order", epoch))
