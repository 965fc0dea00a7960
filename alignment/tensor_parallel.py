"""Tensor parallelism: each process of a rank holds a slice of a layer's matrices and computes with it.

How layers are cut is transformers' plan for the architecture (`PreTrainedModel.tp_plan`), after Shoeybi et al. 2019
(arXiv 1909.08053): the first matrices of attention and MLP by their outputs, so that each process has some of the heads
and some of the MLP's columns, the last ones by their inputs, whose products are summed over processes. Embeddings and
LM head, which a plan may cut too, stay whole here: the engine reads the head's weight beside the model, in tiles.
FSDP2 then cuts what is left on each process over ranks (`alignment.sharding`).

A plan is taken where all its slices are blocks of matrices of their own: they are saved as such
(`alignment.spread_file`). Fused matrices (`packed_colwise`) and experts are cut in other ways, and refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from alignment.errors import UserError
from alignment.float8 import has_float8

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_STYLES: dict[str, int | None] = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "replicated_with_grad_allreduce": None,
}
"""Rule of a plan -> the dimension of a linear layer's weight that it cuts."""
_HEADS = ("num_attention_heads", "num_key_value_heads")
_INSTEAD = "set tensor_parallel_size to 1 and cut it over data_parallel_size alone"


def cut_layers(root: PreTrainedModel, mesh: DeviceMesh, ranks: int) -> None:
    """Cut the layers of a model in place, over the processes of a one-dimensional mesh; `ranks` will cut what each of
    them then holds along its first dimension. Every process holds the same whole model before.

    Raises UserError for a model without a plan or with another kind of plan, one with FP8 layers, and for numbers of
    heads, columns or rows that do not divide.
    """
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise UserError(f"tensor_parallel_size {mesh.size()} needs a newer transformers; 5.24 is tested") from error
    ways = mesh.size()
    if has_float8(root):
        raise UserError(f"callbacks.Fp8Training does not go with tensor_parallel_size {ways}: leave one of them out")
    styles = _styles(root)
    _check_sizes(root, styles, ways, ranks)
    plan: dict[str, str] = {}
    for place, style in styles.items():  # parameters before their module, as transformers wants it
        plan |= {f"{place}.{own}": style for own, _ in root.get_submodule(place).named_parameters(recurse=False)}
        plan[place] = style
    apply_tensor_parallelism(root, mesh, plan)


def _styles(root: PreTrainedModel) -> dict[str, str]:
    """Module -> rule, of the modules that are cut. Raises UserError unless there is a plan of blocks alone."""
    name, plan = type(root).__name__, root.tp_plan or {}
    outside = (root.get_input_embeddings(), root.get_output_embeddings())  # type: ignore[no-untyped-call]
    found: dict[str, str] = {}
    for place, part in (*root.named_modules(), *root.named_parameters()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", place))
        if style is None or any(part is each for each in outside):
            continue
        linear = type(part) is nn.Linear
        if style not in _STYLES or isinstance(part, nn.Parameter) or (_STYLES[style] is not None and not linear):
            raise UserError(f"the tensor-parallel plan for {name} cuts {place} as '{style}', not in blocks; {_INSTEAD}")
        found[place] = style
    if not found:
        raise UserError(f"transformers has no tensor-parallel plan for {name}; {_INSTEAD}")
    return found


def _check_sizes(root: PreTrainedModel, styles: dict[str, str], ways: int, ranks: int) -> None:
    """Raises UserError where something is not cut evenly."""
    settings = root.config.get_text_config(decoder=True)
    sizes = {key: (getattr(settings, key, None) or ways, ways) for key in _HEADS}
    for place, style in styles.items():
        if (dimension := _STYLES[style]) is not None:
            rows, columns = root.get_submodule(place).get_parameter("weight").shape
            sizes[f"rows of {place}"] = (rows, ranks * (ways if dimension == 0 else 1))
            sizes[f"columns of {place}"] = (columns, ways if dimension == 1 else 1)
    for what, (size, parts) in sizes.items():
        if size % parts:
            raise UserError(
                f"{type(root).__name__} cannot be cut evenly by tensor_parallel_size {ways} and data_parallel_size "
                f"{ranks}: {what}: {size}; take other sizes, or {_INSTEAD}"
            )
