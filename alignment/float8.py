"""Training with FP8 matrix products (torchao): weights, moments and everything else stay what they are, and the inputs
of a linear layer's three products (output, gradient of its input, gradient of its weight) are rounded to e4m3fn or, for
gradients, e5m2, with scales taken from the values at hand.

    tensorwise   one scale a tensor: the fastest. A token's values then depend on what else is in the batch.
    rowwise      one scale a token and one an output of the weight: closer, and what a token's log-prob is does not
                 depend on the rest of the batch, as the rest of this project promises.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from torch import nn

from alignment.errors import UserError

Recipe = Literal["rowwise", "tensorwise"]

MULTIPLE = 16
"""What both sizes of a layer must be multiples of, for the products on a GPU."""
FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 products."""

_HERE = "callbacks.Fp8Training"


def check_torchao() -> None:
    """Raise UserError unless torchao can be imported."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{_HERE} needs torchao, which cannot be imported ({error}): pip install 'lightning-alignment[fp8]'"
        ) from error


def to_float8(model: nn.Module, recipe: Recipe, skip: Collection[str], *, emulate: bool) -> nn.Module:
    """The model with its linear layers' products in FP8, changed in place; names and weights stay.

    LM head and adapters stay as they are, and layers that have a name of `skip` anywhere in theirs.

    Args:
        emulate: round the inputs the same way and multiply in full precision: for machines without FP8 products.

    Raises UserError for sizes that are no multiples of 16, and when no layer is left.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from alignment.policy import base_model  # here: log-probs, which it does without, ask this file too

    head = base_model(model).get_output_embeddings()  # type: ignore[no-untyped-call]
    chosen = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and layer is not head
        and not any(part in skip or part.startswith("lora_") for part in name.split("."))
    }
    odd = [name for name, m in chosen.items() if m.in_features % MULTIPLE or m.out_features % MULTIPLE]
    if odd:
        sizes = f"{chosen[odd[0]].in_features} x {chosen[odd[0]].out_features}"
        raise UserError(
            f"{_HERE}: FP8 products need sizes that are multiples of {MULTIPLE}, and {odd[0]} is {sizes} "
            f"({len(odd)} layers in all); leave them out: skip=[{', '.join(sorted({n.split('.')[-1] for n in odd}))}]"
        )
    if not chosen:
        raise UserError(f"{_HERE}: {type(model).__name__} has no linear layer to convert; leave the callback out")
    # Inner sizes are padded: one of them is the number of tokens, which is any number here.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    converted: nn.Module = convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in chosen, config=config
    )
    return converted


def has_float8(model: nn.Module) -> bool:
    """Whether any layer computes in FP8. To ask does not import torchao."""
    return any(_is_float8(module) for module in model.modules())


def float8_as_in(model: nn.Module, like: nn.Module) -> None:
    """Convert the layers of `model` that are converted in `like`, a model of the same architecture, the same way: both
    then make the same log-probs of the same batch."""
    known = sys.modules.get("torchao.float8.float8_linear")
    if known is None:
        return
    parts = dict(model.named_modules())
    for name, layer in like.named_modules():
        if _is_float8(layer):
            parent, _, last = name.rpartition(".")
            setattr(parts[parent], last, known.Float8Linear.from_float(parts[name], config=layer.config))


def _is_float8(module: nn.Module) -> bool:
    known = sys.modules.get("torchao.float8.float8_linear")
    return known is not None and isinstance(module, known.Float8Linear)
