"""Lightning's ModelParallelStrategy with this project's checkpoints.

Lightning's own are pickles beside torch's distributed checkpoint, whose index is a pickle too, and a save that dies
leaves half of one. Here each rank writes what it holds as safetensors, and the folder is committed as any other
(`alignment.checkpoint_folder`); it can be read by any number of ranks, and without sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.optim import Optimizer

from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.spread_file import SpreadTensor, fitted


class ShardedStrategy(ModelParallelStrategy):
    """Takes the place of a ModelParallelStrategy, see `adopt`. The state is loaded before the optimizers are made, as
    without sharding: `configure_model` has sharded the model by then."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def _io(self) -> SafeCheckpointIO:
        io = self.checkpoint_io
        if not isinstance(io, SafeCheckpointIO):
            raise UserError("a sharded run needs trainer.plugins: [alignment.checkpoint.SafeCheckpointIO]")
        return io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return Strategy.lightning_module_state_dict(self)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return Strategy.optimizer_state(self, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError("storage_options are for remote stores; checkpoints are written to local folders only")
        self._io.save_together(checkpoint, self.broadcast(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._io.load_checkpoint(self.broadcast(checkpoint_path), joined=False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        own = module.state_dict()
        given = {name: fitted(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        module.load_state_dict(given, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            own = dict(zip(numbers, parameters, strict=False))
            state = {
                number: {
                    name: fitted(value, own.get(number)) if isinstance(value, torch.Tensor | SpreadTensor) else value
                    for name, value in values.items()
                }
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def adopt(strategy: ModelParallelStrategy) -> None:
    """Make a ShardedStrategy of Lightning's own, which the trainer made from its settings and holds already."""
    if type(strategy) is ModelParallelStrategy:
        strategy.__class__ = ShardedStrategy
