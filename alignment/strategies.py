"""Which of Lightning's strategies and precisions an update works under (docs/scale.md, docs/fp8.md)."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from alignment import distributed
from alignment.errors import UserError
from alignment.sharded_strategy import ShardedStrategy
from alignment.transformer_engine import TransformerEngine

# 16-mixed scales the loss, which `update` does not undo; the -true ones would round log-probs and weights of the batch.
PRECISIONS = ("32-true", "bf16-mixed")

_INSTEAD = "use configs/trainer/fsdp8.yaml: FSDP2 cuts weights, gradients and moments alike"
_OWN_GRADIENTS = {
    "deepspeed": (
        "its engine reduces, clips and saves gradients and moments by itself, while an update here counts over all "
        "ranks, makes a backward for each micro-batch and leaves out a step that is not finite"
    ),
    "fsdp": (
        "FSDP1 finishes gradients for one backward from what its outermost module returns, while an update here makes "
        "its backwards inside of that, one for each micro-batch"
    ),
}
"""Beginning of the name of a strategy of Lightning's -> why an update would not be right under it."""


def refused(strategy: str) -> str:
    """Why a strategy, by its name in Lightning's registry or the path of its class, cannot be used, and what to use in
    its place; "" for one about which that is not known."""
    package, _, name = strategy.rpartition(".")
    for kind, why in _OWN_GRADIENTS.items():
        if name.lower().startswith(kind) and package.partition(".")[0] in ("", "lightning", "pytorch_lightning"):
            return f"trainer.strategy {strategy} is not supported: {why}; {_INSTEAD}"
    return ""


def check_trainer(trainer: L.Trainer) -> None:
    """Raises UserError for a Trainer under which training would be wrong."""
    strategy, precision = trainer.strategy, str(trainer.precision)
    kind = type(strategy)
    if not isinstance(strategy, ModelParallelStrategy):
        distributed.share_ranks(None, None)  # as a run before this one may have left it
    elif not isinstance(strategy, ShardedStrategy):
        raise UserError("trainer.strategy is ModelParallelStrategy and nothing shards the model: add callbacks.FSDP2")
    if told := refused(f"{kind.__module__}.{kind.__name__}"):
        raise UserError(told)
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ShardedStrategy):
        raise UserError(
            f"trainer.strategy {kind.__name__} is not supported; use auto, ddp, or ModelParallelStrategy "
            "with callbacks.FSDP2 (docs/scale.md)"
        )
    if precision not in PRECISIONS and not isinstance(trainer.precision_plugin, TransformerEngine):
        raise UserError(
            f"trainer.precision {precision} is not supported; use {' or '.join(PRECISIONS)}, and policy.dtype for "
            "the number format of the weights (FP8: docs/fp8.md)"
        )
