"""One optimizer with parameter groups, one schedule that counts optimizer steps.

One optimizer, because Lightning's `global_step` counts the steps of every optimizer of a module.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from alignment.errors import UserError
from alignment.spread import is_spread

log = logging.getLogger(__name__)

LARGE_BATCH = 1024
SMALL_BATCH = 32

MATRICES = "matrices"
"""Name of the parameter group with weight decay."""

OptimizerName = Literal["adamw", "adamw_8bit", "lion_8bit", "ademamix_8bit", "paged_adamw_8bit", "sgd"]


@dataclass(kw_only=True, frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule.

    Args:
        lr: peak learning rate.
        optimizer: `adamw` and `sgd` are torch's; the `_8bit` ones are bitsandbytes' (state of tensors below 4,096
            elements stays in 32 bit; the paged one pages on CUDA only).
        weight_decay: decoupled decay of weight matrices; never of biases, norms and other vectors.
        betas: momentum coefficients. None takes the optimizer's own: (0.9, 0.999) for AdamW, (0.9, 0.99) for Lion,
            (0.9, 0.999, 0.9999) for AdEMAMix. SGD takes the first as its momentum, 0 when None.
        eps: added to the denominator by the Adam family.
        schedule: shape after the warm-up, over optimizer steps.
        warmup_steps: optimizer steps over which the rate rises linearly to `lr`; the first step has lr / warmup_steps.
        min_lr_ratio: where cosine and linear end, as a share of `lr`.
        clip_norm: upper bound of the gradient's L2 norm over the whole batch and all parameters. None: no clipping.
        large_batch_rule: multiply `lr` by 0.7 when the global batch has 1,024 rows or more.
    """

    lr: float = 1e-6
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.0
    betas: tuple[float, ...] | None = None
    eps: float = 1e-8
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    clip_norm: float | None = 1.0
    large_batch_rule: bool = False

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(f"optim.lr is {self.lr}; it must be a positive number")
        for name in ("eps", "weight_decay"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise UserError(f"optim.{name} is {value}; it is a number of at least 0")
        if self.warmup_steps < 0 or not 0 <= self.min_lr_ratio <= 1:
            raise UserError("optim.warmup_steps must be >= 0 and optim.min_lr_ratio between 0 and 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"optim.clip_norm is {self.clip_norm}; use a positive number, or null for no clipping")
        expected = 3 if self.optimizer == "ademamix_8bit" else 2
        if self.betas is not None and self.optimizer != "sgd" and len(self.betas) != expected:
            raise UserError(f"optim.betas has {len(self.betas)} values; {self.optimizer} takes {expected}")
        if not all(0 <= beta < 1 for beta in self.betas or ()):
            raise UserError(f"optim.betas is {list(self.betas or ())}; each is at least 0 and below 1")


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, parts: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, matrices with decay and vectors without, in the order given; an empty group
    is left out. `parts` are beginnings of names: each part has groups of its own, behind those of the rest, and their
    names begin with it. What stays whole beside sharded parameters has groups of its own too: torch's optimizers take
    no mixture. Raises UserError when nothing is trainable."""
    kinds = {MATRICES: weight_decay, "vectors": 0.0}
    trained = [(name, p) for name, p in named if p.requires_grad]
    beside = any(is_spread(p) for _, p in trained)
    groups: dict[tuple[str, str, str], list[nn.Parameter]] = {
        (part, place, kind): [] for part in ("", *parts) for place in ("", "whole ") for kind in kinds
    }
    for name, p in trained:
        part = next((part for part in parts if name.startswith(part)), "")
        kind = MATRICES if p.ndim >= 2 and not name.endswith("bias") else "vectors"
        groups[part, "whole " if beside and not is_spread(p) else "", kind].append(p)
    found = [
        {"name": part + place + kind, "part": part, "params": members, "weight_decay": kinds[kind]}
        for (part, place, kind), members in groups.items()
        if members
    ]
    if not found:
        raise UserError("the model has no trainable parameter; a quantised base needs policy.lora")
    return found


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    lr: float,
    factors: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """The configured optimizer over the trainable parameters, with peak learning rate `lr`; that of parameters whose
    names begin with a key of `factors` is its value times as high."""
    named, factors = list(named), factors or {}
    if half := [name for name, p in named if p.requires_grad and p.dtype == torch.float16]:
        raise UserError(
            f"weights in float16 cannot be trained (for example {half[0]}): their range ends at 6e-8, where Adam's eps "
            "and many gradients are 0; use policy.dtype bfloat16 or float32, or policy.lora"
        )
    if config.optimizer not in ("adamw", "sgd") and any(is_spread(p) for _, p in named):
        raise UserError(
            f"optim.optimizer {config.optimizer} cannot hold the state of sharded parameters; with callbacks.FSDP2 use "
            "adamw or sgd"
        )
    groups = parameter_groups(named, config.weight_decay, factors)
    for group in groups:
        group |= {"lr_factor": factors.get(group["part"], 1.0)}
        group |= {"lr": lr * group["lr_factor"]}
    betas = {} if config.betas is None else {"betas": tuple(config.betas)}
    if config.optimizer == "adamw":
        # one pass over memory instead of ten
        return torch.optim.AdamW(groups, lr=lr, eps=config.eps, fused=True, **betas)  # type: ignore[arg-type]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.betas[0] if config.betas else 0.0)
    if config.optimizer == "lion_8bit":
        return _bitsandbytes("Lion8bit")(groups, lr=lr, **betas)
    kinds = {
        "adamw_8bit": "AdamW8bit",
        "paged_adamw_8bit": "PagedAdamW8bit",
        "ademamix_8bit": "AdEMAMix8bit",
    }
    return _bitsandbytes(kinds[config.optimizer])(groups, lr=lr, eps=config.eps, **betas)


def _bitsandbytes(name: str) -> Callable[..., torch.optim.Optimizer]:
    # Imported where it is used: it takes seconds, and looks for a GPU.
    kind: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module("bitsandbytes.optim"), name)
    return kind


def lr_factor(step: int, config: OptimConfig, total_steps: float) -> float:
    """Learning rate at optimizer step `step` (0-based), as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1.0, total_steps - config.warmup_steps))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: float, share: Callable[[], float] = lambda: 1.0
) -> LambdaLR:
    """The schedule over optimizer steps. Raises ValueError when a falling schedule does not know where it ends.

    `share` is what the whole schedule is multiplied by, read at each step; when it changes, call `refresh`.
    """
    if config.schedule != "constant" and not math.isfinite(total_steps):
        raise UserError(
            f"optim.schedule is '{config.schedule}' but the length of the run is unknown: set trainer.max_steps or "
            "trainer.max_epochs, or optim.schedule: constant"
        )
    return LambdaLR(optimizer, lambda step: share() * lr_factor(step, config, total_steps))


def peak_lr(config: OptimConfig, batch_size: int | None) -> float:
    """`config.lr` after the large-batch rule, for a global batch of `batch_size` rows (None: not known)."""
    if not config.large_batch_rule:
        return config.lr
    if batch_size is None:
        raise UserError("optim.large_batch_rule needs a data module with a batch_size")
    if batch_size < LARGE_BATCH:
        return config.lr
    reduced = config.lr * 0.7
    log.warning("large-batch rule: batch %d >= %d, learning rate %g -> %g", batch_size, LARGE_BATCH, config.lr, reduced)
    return reduced


def refresh(optimizer: torch.optim.Optimizer, schedule: LambdaLR, weight_decay: float | None) -> None:
    """After a resume, or when something moved the rate: the rate this schedule has at the step reached, whatever it was
    under the schedule before.

    With `weight_decay` also everything else that `build_optimizer` was given: torch keeps what the state brings (peak
    rate, decay, betas, eps), while settings given anew are the ones to use. None leaves those as they were saved.
    """
    for i, group in enumerate(optimizer.param_groups):
        if weight_decay is not None:
            fresh = optimizer.defaults  # not part of the state
            group.update({name: fresh[name] for name in ("betas", "eps", "momentum") if name in fresh})
            group["weight_decay"] = weight_decay if group["name"].endswith(MATRICES) else 0.0
            group["initial_lr"] = schedule.base_lrs[i] = fresh["lr"] * group["lr_factor"]
        group["lr"] = schedule.base_lrs[i] * schedule.lr_lambdas[i](schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def rescale(optimizer: torch.optim.Optimizer, schedule: LambdaLR, part: str, factor: float) -> None:
    """Another factor on the learning rate of a part that has groups of its own (`build_optimizer`)."""
    for i, group in enumerate(optimizer.param_groups):
        if group["part"] == part and group["lr_factor"] != factor:
            group["lr"] *= factor / group["lr_factor"]
            group["initial_lr"] = schedule.base_lrs[i] = schedule.base_lrs[i] * factor / group["lr_factor"]
            group["lr_factor"] = factor
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
