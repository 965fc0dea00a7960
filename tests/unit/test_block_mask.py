"""Block masks against masks over whole rows, and FlexAttention on them against the plain path, as far as a CPU can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import masking_utils
from transformers.integrations import flex_attention as hf_flex

from alignment.batches import Group, GroupBatch
from alignment.block_mask import block_mask
from alignment.errors import UserError
from alignment.layout import LayerMask, attention_mask, pack
from alignment.local_rollout import LocalRollout
from alignment.logprobs import BF16_BOUND, LogProbEngine
from alignment.policy import PolicyConfig
from alignment.rollout import SamplingConfig
from modules import SFT
from tests.architectures import DENSE, MIXTURES, build, ragged_batch
from tests.toys import FixedData, groups, trainer

LAYERS = {
    "full": LayerMask(),
    "short window": LayerMask(window=7),
    "window over blocks": LayerMask(window=150),
    "window of one": LayerMask(window=1),
    "chunks": LayerMask(chunk=50),
    "window and chunks": LayerMask(window=33, chunk=64),
}


def batch_of(shapes: list[tuple[int, list[int]]]) -> GroupBatch:
    return GroupBatch.from_groups([Group(prompt=[1] * p, completions=[[2] * n for n in own]) for p, own in shapes])


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@settings(max_examples=20, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(0, 150), max_size=4)), min_size=1, max_size=5)
)
def test_every_layout_gives_the_dense_mask_and_torchs_own_blocks(layer, shapes):
    layout = pack(batch_of(shapes), pad_id=0)
    rows, width = layout.group.shape
    dense = attention_mask(layout, layer)
    ours = block_mask(layout, layer)
    assert ours.shape == (rows, 1, width, width)
    assert torch.equal(create_mask(ours.mask_mod, rows, 1, width, width, "cpu"), dense)
    torchs = create_block_mask(lambda b, h, q, k: dense[b, 0, q, k], rows, None, width, width, "cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        for what in ("num_blocks", "indices"):
            assert torch.equal(getattr(ours, f"{kind}_{what}"), getattr(torchs, f"{kind}_{what}")), f"{kind}_{what}"


def test_blocks_by_hand():
    """A prompt and two completions of one block each: the second completion's queries skip the first one's keys."""
    mask = block_mask(pack(batch_of([(128, [128, 128])]), pad_id=0), LayerMask())
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1]]]  # the diagonal
    assert mask.kv_indices[0, 0, :, 0].tolist() == [0, 1, 2]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 1]]]  # the prompt
    assert mask.full_kv_indices[0, 0, 1:, 0].tolist() == [0, 0]
    assert mask.sparsity() == pytest.approx(100 * 4 / 9)


# ---------------------------------------------------------------------- attention


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention in plain operations: the same mathematics, without a compiler."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def forward(query: Any, key: Any, value: Any, training: bool = False, **options: Any) -> Any:
        return flex.flex_attention(query, key, value, **options)

    monkeypatch.setattr(hf_flex, "compile_friendly_flex_attention", forward)
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *a, _compile, **k: create_block_mask(*a, **k))


def flexible(name: str, dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
    model = build({**DENSE, **MIXTURES}[name](), dtype=dtype)
    model.set_attn_implementation("flex_attention")
    return model


FLEXIBLE = ("llama", "llama-tied", "qwen2-window", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "cohere2", "mixtral")


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", [*FLEXIBLE, "llama4-chunked"])
def test_flex_attention_on_block_masks_equals_the_plain_path_by_sdpa(name):
    """Of gemma2 by eager attention, since sdpa knows no softcap."""
    reference, batch = build({**DENSE, **MIXTURES}[name]()), ragged_batch()
    model = flexible(name)
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        expected = LogProbEngine(reference, path="plain")(batch, entropy=True, hidden="at")
        engine = LogProbEngine(model, path="shared")
        found = engine(batch, entropy=True, hidden="at")
    assert engine.path == "shared"
    torch.testing.assert_close(found.logps, expected.logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("mixed", [False, True])
def test_flex_attention_in_bf16(mixed):
    batch = ragged_batch()
    model, reference = flexible("llama", torch.float32), build(DENSE["llama"]())
    if not mixed:
        model, reference = model.bfloat16(), reference.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        expected = LogProbEngine(reference, path="plain")(batch).logps
        found = LogProbEngine(model, path="shared")(batch).logps
    torch.testing.assert_close(found, expected, atol=BF16_BOUND, rtol=0)


@pytest.mark.usefixtures("unfused")
def test_a_wrong_block_mask_is_noticed(monkeypatch):
    """Completions that see each other."""
    monkeypatch.setattr(
        "alignment.logprobs.block_mask",
        lambda layout, layer: create_block_mask(
            lambda b, h, q, k: q >= k, layout.group.shape[0], None, *[layout.group.shape[1]] * 2, "cpu"
        ),
    )
    engine = LogProbEngine(flexible("llama"))
    with torch.no_grad():
        engine.verify()
    assert engine.path == "plain"
    assert "log-probs differ" in engine.reason
    with pytest.raises(ValueError, match="the shared path does not fit LlamaForCausalLM"):
        LogProbEngine(flexible("llama"), path="shared").verify()


@pytest.mark.usefixtures("unfused")
def test_rollouts_of_such_a_model_attend_by_sdpa_meanwhile():
    model, reference = flexible("llama"), build(DENSE["llama"]())
    drawn = []
    for one in (model, reference):
        engine = LocalRollout(one, pad_id=0, stop_ids=[2], path="shared")
        prompts = [Group(prompt=[5, 6, 7], completions=(), index=0), Group(prompt=[8], completions=(), index=1)]
        drawn.append(engine.generate(prompts, 3, SamplingConfig(max_tokens=6), seed=0, step=0))
    assert torch.equal(drawn[0].batch.completion_ids, drawn[1].batch.completion_ids)
    assert model.config._attn_implementation == "flex_attention"


def test_batches_of_any_shape_compile_a_handful_of_times():
    """What is compiled depends on neither the layout nor the layer: at most once for one row and once for one block
    more than in general. (FlexAttention is traced here, and not turned into a kernel.)"""
    compiled = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    fused = torch.compile(flex.flex_attention, backend=count, dynamic=True, fullgraph=True)
    shapes = [[(200, [100, 150]), (90, [30])], [(300, [20] * 5)] * 3, [(40, [20, 30])], [(20, [9])] * 2]
    with torch.no_grad():
        for step in range(3):
            for i, shape in enumerate(shapes):
                layout = pack(batch_of([(p + step, own) for p, own in shape]), pad_id=0)
                rows, width = layout.group.shape
                for layer in (LayerMask(), LayerMask(window=64 + i + step)):
                    q, (k, v) = torch.randn(rows, 4, width, 16), torch.randn(2, rows, 2, width, 16)
                    fused(q, k, v, block_mask=block_mask(layout, layer), enable_gqa=True)
    assert len(compiled) <= 4


# ---------------------------------------------------------------------- refusals


def test_training_on_a_cpu_is_refused_before_anything_is_loaded(tmp_path):
    module = SFT(policy=PolicyConfig(name="tiny", attention="flex_attention"))
    with pytest.raises(UserError, match="cannot be trained on cpu, for which torch has no backward of it; use sdpa"):
        trainer(tmp_path, max_steps=1).fit(module, datamodule=FixedData(groups(4, 1)))


def test_dropout_is_refused():
    with pytest.raises(UserError, match="flex_attention knows no dropout"):
        PolicyConfig(name="tiny", attention="flex_attention", dropout=True)


def test_an_unknown_attention_is_refused():
    with pytest.raises(UserError, match=r"policy\.attention is one of sdpa, eager, flash_attention_2, flex_attention"):
        PolicyConfig(name="tiny", attention="flex")
