"""The order in which a policy is changed after it is read, and the pairs that do not go together.

Callbacks (float8, FSDP2) register their step before the model exists; `load_policy` adds its own and applies all of
them. The order is fixed because each step sees what the one before left: adapters wrap quantised layers, float8
replaces what adapters left, checkpointing wraps finished blocks, sharding takes the final parameters, and compilation
comes last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn

from alignment.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Stage = Literal["quantise", "lora", "float8", "activation_checkpointing", "fully_shard", "compile"]
Transform = Callable[[nn.Module], nn.Module]

STAGES: tuple[Stage, ...] = get_args(Stage)
FORBIDDEN: dict[tuple[Stage, Stage], str] = {
    ("quantise", "float8"): "float8 needs the linear layers that 4-bit or 8-bit loading has replaced; "
    "set policy.quantization to none or remove the float8 callback",
}

# Names under which model configurations and modules keep probabilities of dropping something.
_DROPOUT = re.compile(r"(^|_)(dropout|pdrop|layerdrop|drop_path)(_|$)|dropout$")


class Transforms:
    """Named steps, at most one a stage, applied in the order of `STAGES` whatever the order of registration."""

    def __init__(self) -> None:
        self._steps: dict[Stage, Transform] = {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Registered stages in the order in which they are applied."""
        return tuple(s for s in STAGES if s in self._steps)

    def register(self, stage: Stage, transform: Transform) -> None:
        """Add a step: a function that takes the model and returns it, changed in place or wrapped.

        Raises:
            UserError: unknown stage, a stage that already has a step, or two stages that do not go together.
        """
        if stage not in STAGES:
            raise UserError(f"unknown model transform '{stage}'; the stages are {', '.join(STAGES)}")
        if stage in self._steps:
            raise UserError(f"two settings ask for the model transform '{stage}'; remove one of them")
        for pair, reason in FORBIDDEN.items():
            if stage in pair and all(s == stage or s in self._steps for s in pair):
                raise UserError(f"{pair[0]} and {pair[1]} do not go together: {reason}")
        self._steps[stage] = transform

    def copy(self, *without: Stage) -> Transforms:
        """An independent registry with the same steps, but for those of some stages."""
        other = Transforms()
        other._steps = {stage: step for stage, step in self._steps.items() if stage not in without}
        return other

    def apply(self, model: nn.Module) -> nn.Module:
        """Run every step in order and return the resulting model."""
        for stage in self.stages:
            model = self._steps[stage](model)
        return model


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout probability to 0, in modules and in the configuration (which an export keeps)."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and _DROPOUT.search(name):
                setattr(module, name, 0.0)
    settings = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    for part in settings:
        for name, value in vars(part).items():
            if isinstance(value, float) and _DROPOUT.search(name):
                setattr(part, name, 0.0)
