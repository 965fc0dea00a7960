"""Sharding with FSDP2, and tensor parallelism below it: see `alignment.sharding`, `alignment.tensor_parallel`."""

from __future__ import annotations

from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from alignment import distributed
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
    gradients and the optimizer's state. It goes with `trainer.strategy` ModelParallelStrategy: `data_parallel_size` is
    the number of ranks, which read rows of their own, `tensor_parallel_size` that of the processes of each, among which
    the matrices of every layer are cut first, by transformers' plan for the architecture. Offline training only where
    that is above 1.

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
        if not isinstance(pl_module, TakesTransforms):
            raise UserError(f"callbacks.FSDP2 needs a module that builds a policy; {type(pl_module).__name__} does not")
        ranks, twins = strategy.device_mesh["data_parallel"], strategy.device_mesh["tensor_parallel"]
        if twins.size() > 1:
            _check_tensor_parallel(pl_module, twins.size(), trainer.world_size)
            distributed.share_ranks(ranks.get_group(), twins.get_group())  # until another run is set up
        else:
            distributed.share_ranks(None, None)
        adopt(strategy)
        if self._module is pl_module or is_sharded(pl_module):
            return  # sharded by an earlier fit or evaluation
        self._module = pl_module
        pl_module.register_transform(
            "fully_shard",
            Sharding(
                mesh=ranks,
                twins=twins if twins.size() > 1 else None,
                param_dtype=None if self.param_dtype is None else getattr(torch, self.param_dtype),
                reduce_dtype=None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype),
            ),
        )


def _check_tensor_parallel(module: Any, ways: int, processes: int) -> None:
    """Raises UserError for what cannot be right where several processes are one rank."""
    name, config = type(module).__name__, module.policy_config
    why = ""
    if module.reads == "prompts":
        why = f"{name} samples and asks rewards in each process, which may answer differently in those of one rank"
    elif config.lora is not None or config.quantization != "none":
        why = "transformers' plans know no adapters and no weights in 4 or 8 bits"
    if why:
        raise UserError(
            f"trainer.strategy has tensor_parallel_size {ways} (auto is one for each device), and {why}; write "
            f"{LINE % processes}"
        )
