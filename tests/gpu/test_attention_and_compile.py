"""`policy.attention: flex_attention` and `policy.compile` on a GPU against the plain path, by sdpa and as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from alignment.batches import Group, GroupBatch
from alignment.compiled import compile_layers
from alignment.logprobs import BF16_BOUND, LogProbEngine
from tests.architectures import DENSE, build, ragged_batch, token_ids

pytestmark = pytest.mark.gpu
NAMES = ("llama", "qwen3", "mistral", "gemma3")
"""Full attention, and windows in all and in some of the layers."""


def wide(config: hf.PreTrainedConfig) -> hf.PreTrainedConfig:
    """The kernels take heads of at least 16."""
    config.head_dim = 16
    config.max_position_embeddings = 1024
    return config


def long_batch() -> GroupBatch:
    """Rows of several blocks of 128, groups side by side, padding."""
    shapes = [(300, (200, 90, 150)), (130, (40,)), (20, (128, 7)), (257, (1, 255))]
    return GroupBatch.from_groups(
        [Group(prompt=token_ids(p, p), completions=[token_ids(n, n) for n in own]) for p, own in shapes]
    )


def measured(model: hf.PreTrainedModel, batch: GroupBatch, path: Any, mixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    engine = LogProbEngine(model, path=path)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed):
        logps = engine(batch).logps
    assert logps is not None
    (logps * torch.linspace(-1.0, 1.5, len(logps), device=logps.device)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return logps.detach(), gradient


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16-mixed"])
@pytest.mark.parametrize("batch", [ragged_batch(), long_batch()], ids=["one block", "several blocks"])
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_and_gradients_are_those_of_the_plain_path(name: str, batch: GroupBatch, mixed: bool) -> None:
    torch._dynamo.reset()
    reference, model = build(wide(DENSE[name]())).cuda(), build(wide(DENSE[name]())).cuda()
    model.set_attn_implementation("flex_attention")
    batch = batch.to("cuda")
    expected = measured(reference, batch, "plain", mixed)
    found = measured(model, batch, "shared", mixed)
    torch.testing.assert_close(found[0], expected[0], atol=BF16_BOUND if mixed else 1e-4, rtol=0)
    cosine = torch.cosine_similarity(found[1].double(), expected[1].double(), dim=0)
    assert cosine >= (0.999 if mixed else 0.99999)


def test_gradient_checkpointing_runs_on_the_same_masks() -> None:
    torch._dynamo.reset()
    gradients = []
    for checkpointing in (False, True):
        model = build(wide(DENSE["llama"]())).cuda()
        model.set_attn_implementation("flex_attention")
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        gradients.append(measured(model, long_batch().to("cuda"), "shared", False)[1])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16-mixed"])
@pytest.mark.parametrize("path", ["shared", "plain"])
def test_compiled_layers_change_neither(path: Any, mixed: bool, attention: str) -> None:
    torch._dynamo.reset()
    model = build(wide(DENSE["llama"]())).cuda()
    batches = [batch.to("cuda") for batch in (ragged_batch(), long_batch())]
    expected = [measured(model, batch, path, mixed) for batch in batches]
    model.set_attn_implementation(attention)
    compile_layers(model)
    for batch, (logps, gradient) in zip(batches, expected, strict=True):
        found = measured(model, batch, path, mixed)
        torch.testing.assert_close(found[0], logps, atol=BF16_BOUND if mixed else 1e-4, rtol=0)
        cosine = torch.cosine_similarity(found[1].double(), gradient.double(), dim=0)
        assert cosine >= (0.999 if mixed else 0.99999)
