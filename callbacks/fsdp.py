"""Sharding with FSDP2: see `alignment.sharding`."""

from __future__ import annotations

from typing import Literal, get_args

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from alignment.errors import UserError
from alignment.protocols import TakesTransforms
from alignment.sharded_strategy import adopt
from alignment.sharding import Sharding, is_sharded

Format = Literal["float32", "bfloat16"]

LINE = (
    "trainer.strategy: {class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: "
    "{data_parallel_size: %d, tensor_parallel_size: 1}}"
)
"""What the user must write, for so many processes."""


class FSDP2(L.Callback):
    """Cuts policy, reference, critic and reward model over ranks, transformer block by transformer block: parameters,
    gradients and the optimizer's state. It goes with `trainer.strategy` ModelParallelStrategy, whose data_parallel_size
    is the number of all processes.

    Args:
        param_dtype: number format in which blocks gather their parameters and compute; gradients, the optimizer's state
            and the updated weights keep that of `policy.dtype`. None: that of `policy.dtype`.
        reduce_dtype: number format in which gradients are summed over ranks. None: that of the gradients.
    """

    def __init__(self, param_dtype: Format | None = None, reduce_dtype: Format | None = "float32") -> None:
        for name, value in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
            if value is not None and value not in get_args(Format):
                raise UserError(f"FSDP2.{name} is one of {', '.join(get_args(Format))}, or null; got '{value}'")
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self._module: L.LightningModule | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy):
            raise UserError(
                f"callbacks.FSDP2 shards through Lightning's ModelParallelStrategy, and trainer.strategy is "
                f"{type(strategy).__name__}; write {LINE % max(1, trainer.world_size)}"
            )
        ways = strategy.device_mesh["tensor_parallel"].size()
        if ways > 1:
            raise UserError(
                f"trainer.strategy has tensor_parallel_size {ways} (auto is one for each device), and callbacks.FSDP2 "
                f"cuts over data_parallel_size alone; write {LINE % trainer.world_size}"
            )
        if not isinstance(pl_module, TakesTransforms):
            raise UserError(f"callbacks.FSDP2 needs a module that builds a policy; {type(pl_module).__name__} does not")
        adopt(strategy)
        if self._module is pl_module or is_sharded(pl_module):
            return  # sharded by an earlier fit or evaluation
        self._module = pl_module
        pl_module.register_transform(
            "fully_shard",
            Sharding(
                mesh=strategy.device_mesh["data_parallel"],
                param_dtype=None if self.param_dtype is None else getattr(torch, self.param_dtype),
                reduce_dtype=None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype),
            ),
        )
