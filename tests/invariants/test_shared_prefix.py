"""What must hold of the shared-prefix path: completions are blind to each other, memory is bounded."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.logprobs import LogProbEngine, TokenStats
from tests.allocations import Allocations
from tests.architectures import DENSE, MIXTURES, build, ragged_batch, token_ids

dense = pytest.mark.parametrize("config", DENSE.values(), ids=DENSE)
WATCHED = 9  # tokens of the first completion


def with_others(seed: int, length: int = 7) -> GroupBatch:
    """The first completion is always the same; `seed` makes the text of its sibling and of its row-mates."""
    return GroupBatch.from_groups(
        [
            Group(prompt=token_ids(12, 1), completions=[token_ids(WATCHED, 2), token_ids(length, seed)]),
            Group(prompt=token_ids(6, seed + 1), completions=[token_ids(5, seed + 2)]),
            Group(prompt=token_ids(3, 6), completions=[token_ids(4, seed + 3)]),
        ]
    )


def watched(engine: LogProbEngine, batch: GroupBatch) -> list[Tensor]:
    with torch.no_grad():
        out: TokenStats = engine(batch, entropy=True, hidden="at")
    return [t[:WATCHED] for t in (out.logps, out.entropy, out.hidden)]


@dense
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_another_completions_content_does_not_change_one_bit(config, dtype):
    engine = LogProbEngine(build(config(), dtype=dtype), path="shared")
    for a, b in zip(watched(engine, with_others(30)), watched(engine, with_others(60)), strict=True):
        assert torch.equal(a, b)


def test_bit_identity_holds_at_a_size_that_takes_blocked_kernels():
    config = hf.LlamaConfig(
        vocab_size=1000, hidden_size=288, intermediate_size=768, num_hidden_layers=2, num_attention_heads=6
    )
    engine = LogProbEngine(build(config), path="shared")
    group = {"prompt": token_ids(256, 1)}
    a, b = (
        GroupBatch.from_groups(
            [Group(**group, completions=[token_ids(64, 2), *(token_ids(64, s + k) for k in range(7))])]
        )
        for s in (10, 20)
    )
    for x, y in zip(watched(engine, a), watched(engine, b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_of_experts_are_blind_to_1e_6(config):
    engine = LogProbEngine(build(config()), path="shared")
    a, b = (watched(engine, with_others(seed))[0] for seed in (30, 60))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@dense
def test_another_completions_length_moves_the_last_bits_only(config):
    engine = LogProbEngine(build(config()), path="shared")
    expected = watched(engine, with_others(30))
    for length in (0, 1, 8, 30):
        for a, b in zip(expected, watched(engine, with_others(30, length)), strict=True):
            torch.testing.assert_close(b, a, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bound", [8, 25, 60])
@pytest.mark.parametrize("keep_groups", [True, False])
def test_micro_batches_give_the_values_of_the_whole(bound, keep_groups):
    batch = ragged_batch()
    batch = batch.with_tokens(place=torch.arange(len(batch.completion_ids), dtype=torch.float32))
    engine = LogProbEngine(build(DENSE["gemma3"]()), path="shared")
    with torch.no_grad():
        whole = engine(batch).logps
        seen = torch.full_like(whole, torch.nan)
        for part in batch.split(bound, keep_groups=keep_groups):
            seen[part.tokens["place"].long()] = engine(part).logps
    torch.testing.assert_close(seen, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_of_tokens_times_vocabulary(tied):
    vocab = 8192
    config = hf.LlamaConfig(
        vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    batch = GroupBatch.from_groups([Group(prompt=token_ids(64, 1), completions=[token_ids(64, 2), token_ids(64, 3)])])
    seen = {}
    for path in ("shared", "plain"):
        engine = LogProbEngine(model, path=path, tile_bytes=1 << 16)
        engine.verify()
        with Allocations() as memory:
            out = engine(batch, entropy=True)
            (out.logps.sum() + out.entropy.sum()).backward()
        seen[path] = memory.largest
    assert seen["plain"] == 128 * vocab
    assert seen["shared"] == vocab * 8  # the embedding and the head's gradient
