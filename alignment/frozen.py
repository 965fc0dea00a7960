"""What a reference (`alignment.reference`) is asked for, and how: without gradient, in evaluation mode, beside a policy
that is being trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alignment.adapters import is_adapted
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.float8 import float8_as_in
from alignment.logprobs import LogProbEngine
from alignment.policy import PolicyConfig, load_policy
from alignment.sharding import sharding_of

if TYPE_CHECKING:
    from peft import PeftModel


def read_logps(engine: LogProbEngine, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
    with torch.no_grad():
        values = engine(batch, temperature=temperature).logps
    assert values is not None
    return values


def read_stats(engine: LogProbEngine, batch: GroupBatch) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        stats = engine(batch, entropy=True)
    assert stats.logps is not None
    assert stats.entropy is not None
    return stats.logps, stats.entropy


def read_states(engine: LogProbEngine, batch: GroupBatch) -> Tensor:
    with torch.no_grad():
        values = engine(batch, logps=False, hidden="before").hidden
    assert values is not None
    return values


def starting_policy(config: PolicyConfig, *, like: nn.Module) -> nn.Module:
    """The policy before training, frozen, in evaluation mode, where, in the dtype and sharded as `like` is."""
    model = load_policy(replace(config, gradient_checkpointing=False)).eval().requires_grad_(False)
    float8_as_in(model, like)
    if (sharding := sharding_of(like)) is not None:
        sharding(model)
    follow(model, like)
    return model


def follow(model: nn.Module, policy: nn.Module) -> None:
    """Move to the policy's device, and to its dtype (Lightning's true-half precisions convert the policy late)."""
    target, own = reference_parameter(policy), reference_parameter(model)
    if (own.device, own.dtype) != (target.device, target.dtype):
        nn.Module.to(model, target.device, target.dtype)


def reference_parameter(model: nn.Module) -> nn.Parameter:
    """Any floating-point parameter; it stands for the model's device and dtype."""
    return next(p for p in model.parameters() if p.is_floating_point())


def peft_model(policy: nn.Module) -> PeftModel:
    """The PeftModel, also inside a compiled or sharded wrapper."""
    found = next((m for m in policy.modules() if is_adapted(m)), None)
    if found is None:
        raise UserError(f"{type(policy).__name__} has no adapters to switch; use reference=cached or copy")
    return found


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module's mode and every parameter's requires_grad is as before.

    Dropout must not act on a reference, and peft marks adapters as trainable or frozen whenever one is switched.
    """
    modes = [(m, m.training) for m in model.modules()]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
