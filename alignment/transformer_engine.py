"""FP8 by NVIDIA's TransformerEngine, as a Lightning precision plug-in; the alternative to callbacks.Fp8Training.

Lightning's own (`precision: transformer-engine`) does not fit here. It replaces layers after everything has read the
model, so that the LM head which log-probs are computed with would no longer be the model's, and tied embeddings would
come apart; it rounds weights and the numbers of rows to bfloat16; and its scales are a history that a checkpoint would
hold as a pickle. This one replaces the linear layers inside decoder layers as the transform `float8`, leaves dtypes as
they are (what TransformerEngine does not compute is autocast to bfloat16, as under `bf16-mixed`), takes scales from the
values at hand, and pads tokens to the multiple that the products want. Names of weights stay.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import TransformerEnginePrecision
from torch import Tensor, nn

from alignment.adapters import is_adapted
from alignment.errors import UserError
from alignment.swapping import decoder_layers

_HERE = "alignment.transformer_engine.TransformerEngine"
_TOKENS = 16


class TransformerEngine(TransformerEnginePrecision):
    """Give it as trainer.plugins; `alignment.module.PolicyMixin` converts its policy with it. Needs transformer-engine
    2 or later and a GPU with FP8. A policy with adapters or a quantised base is refused."""

    def __init__(self) -> None:
        try:
            import transformer_engine.pytorch  # noqa: F401
            from transformer_engine.common.recipe import Float8CurrentScaling
        except ImportError as error:
            raise UserError(
                f"{_HERE} needs transformer-engine 2 or later, which cannot be imported ({error}): "
                "pip install 'transformer-engine[pytorch]'"
            ) from error
        super().__init__(
            weights_dtype=torch.float32,
            recipe=Float8CurrentScaling(),
            replace_layers=False,
            fallback_compute_dtype=torch.bfloat16,
        )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Nothing: it is too late to replace layers, and weights have the policy's dtype."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Nothing: the numbers of rows stay as they are."""
        return data

    def convert_policy(self, model: nn.Module) -> nn.Module:
        """Replace the linear layers inside decoder layers. Raises UserError for adapters and when there is none."""
        if is_adapted(model):
            raise UserError(f"{_HERE} does not go with policy.lora; use callbacks.Fp8Training, which does")
        places = [
            (parent, name, child)
            for layer in decoder_layers(model)
            for parent in layer.modules()
            for name, child in parent.named_children()
            if type(child) is nn.Linear
        ]
        if not places:
            raise UserError(f"{_HERE}: cannot tell the linear layers of {type(model).__name__}; leave it out")
        kind = _padding_linear()
        for parent, name, child in places:
            setattr(parent, name, _taking_over(kind, child))
        return model


def _padding_linear() -> Any:
    """TransformerEngine's linear layer for any number of tokens, without a state of its own."""
    import transformer_engine.pytorch as te

    class PaddingLinear(te.Linear):  # type: ignore[misc]
        # Its extra state is a pickle; with scales from the values at hand there is nothing in it.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.shape[:-1].numel()
            rows = nn.functional.pad(x.reshape(tokens, x.shape[-1]), (0, 0, 0, -tokens % _TOKENS))
            out: Tensor = super().forward(rows)
            return out[:tokens].view(*x.shape[:-1], out.shape[-1])

    return PaddingLinear


def _taking_over(kind: Any, layer: nn.Linear) -> nn.Module:
    """A layer of another kind with this one's parameters."""
    weight = layer.weight
    made: nn.Module = kind(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=weight.dtype,
        device=weight.device,
    )
    made.weight, made.training = weight, layer.training
    if layer.bias is not None:
        made.bias = layer.bias
    return made
