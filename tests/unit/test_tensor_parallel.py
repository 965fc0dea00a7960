"""Which models are cut tensor-parallel. What they compute then: tests/distributed/test_scale.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alignment import tensor_parallel
from alignment.errors import UserError
from alignment.tensor_parallel import cut_layers
from tests.architectures import DENSE, MIXTURES, build


def mesh(ways: int) -> Any:
    return SimpleNamespace(size=lambda: ways)


@pytest.mark.parametrize(
    ("model", "ways", "ranks", "told"),
    [
        (DENSE["gpt2"], 2, 1, r"^transformers has no tensor-parallel plan for GPT2LMHeadModel; set tensor_parallel_si"),
        (MIXTURES["qwen3-moe"], 2, 1, r"for Qwen3MoeForCausalLM cuts \S*experts\S* as '\w+', not in blocks; set"),
        (DENSE["llama"], 4, 1, r"by tensor_parallel_size 4 and data_parallel_size 1: num_key_value_heads: 2; take"),
        (DENSE["llama"], 2, 32, r"data_parallel_size 32: rows of model\.layers\.0\.self_attn\.q_proj: 32; take other"),
    ],
)
def test_what_is_refused(model: Any, ways: int, ranks: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        cut_layers(build(model()), mesh(ways), ranks)


def test_fp8_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "has_float8", lambda model: True)
    with pytest.raises(UserError, match=r"callbacks\.Fp8Training does not go with tensor_parallel_size 2"):
        cut_layers(build(DENSE["llama"]()), mesh(2), 1)


def test_layers_are_cut_and_embeddings_are_not() -> None:
    """Each layer of a Llama has seven matrices; its embeddings are in transformers' plan too."""
    model = build(DENSE["llama"]())
    assert "model.embed_tokens" in model.tp_plan
    found = tensor_parallel._styles(model)
    first = {place.removeprefix("model.layers.0."): style for place, style in found.items() if ".layers.0." in place}
    assert first == {
        **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
        "self_attn.o_proj": "rowwise",
        **{f"mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "mlp.down_proj": "rowwise",
    }
    assert len(found) == 7 * 3
