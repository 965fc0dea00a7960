"""Attention within groups: the same numbers as a mask over the whole row, in both forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from alignment import prefix_attention
from alignment.batches import Group, GroupBatch
from alignment.layout import LayerMask, Section, attention_mask, pack
from alignment.logprobs import LogProbEngine
from tests.architectures import DENSE, build

HEADS, SIZE = 4, 8
BATCHES = {
    "alike": [(5, (3, 3)), (5, (3, 3))],
    "ragged": [(5, (3, 4)), (2, (6,)), (7, (1, 2, 3)), (4, ()), (1, (2, 0))],
    "one group": [(3, (4, 4, 4))],
}


def batch_of(groups):
    return GroupBatch.from_groups(
        [Group(prompt=[7] * prompt, completions=[[8] * n for n in lengths]) for prompt, lengths in groups]
    )


def attend(layout, q, k, v, **options):
    with prefix_attention.prefix_attention([], layout.sections):
        out, _ = prefix_attention._attention(torch.nn.Identity(), q, k, v, None, **options)
    return out.transpose(1, 2)


@pytest.mark.parametrize("groups", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("form", ["flash", "products"])
def test_values_and_gradients_are_those_of_the_mask(groups, kv_heads, form, monkeypatch):
    if form == "products":  # in fp64, so that only a wrong formula differs
        monkeypatch.setattr(prefix_attention, "_flash", lambda q, k, v, parts, scale, _: prefix_attention._products(
            q, k, v, parts, scale))  # fmt: skip
    layout = pack(batch_of(groups), 0)
    rows, width = layout.input_ids.shape
    q = torch.randn(rows, width, HEADS, SIZE, dtype=torch.float64).transpose(1, 2)
    k, v = (torch.randn(rows, width, kv_heads, SIZE, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    real = (layout.group >= 0)[:, None, :, None]
    ways = {
        "mask": lambda q, k, v: F.scaled_dot_product_attention(
            q,
            *(t.repeat_interleave(HEADS // kv_heads, 1) for t in (k, v)),
            attn_mask=attention_mask(layout, LayerMask()),
        ),
        "groups": lambda q, k, v: attend(layout, q, k, v),
    }
    found = {}
    for name, way in ways.items():
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = way(*inputs) * real
        (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
        found[name] = [out.detach(), *(t.grad for t in inputs)]
    for ours, theirs in zip(found["groups"], found["mask"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_half_precision_takes_products_where_a_token_sees_few_others(monkeypatch):
    taken = []
    for name in ("_flash", "_products"):
        monkeypatch.setattr(
            prefix_attention,
            name,
            lambda q, k, v, parts, *_, name=name: taken.append((name, parts)) or torch.zeros_like(v),
        )
    limit = prefix_attention._KEYS
    q = torch.zeros(1, 1, 1, 1)
    group = prefix_attention._group
    group(q.bfloat16(), q, q, Section(3, (2, 4)), 1.0, 0.0)
    group(q, q, q, Section(3, (2, 4)), 1.0, 0.0)
    group(q.bfloat16(), q, q, Section(3, (2, 4)), 1.0, 0.1)  # with dropout
    group(q.bfloat16(), q, q, Section(limit - 1, (1,)), 1.0, 0.0)  # one completion: one text of `limit` tokens
    group(q.bfloat16(), q, q, Section(limit, (1,)), 1.0, 0.0)
    assert taken == [
        ("_products", [3, 2, 4]),
        ("_flash", [3, 2, 4]),
        ("_flash", [3, 2, 4]),
        ("_products", [limit]),
        ("_flash", [limit + 1]),
    ]


def test_the_sections_of_a_layout_fill_its_rows():
    layout = pack(batch_of(BATCHES["ragged"]), 0)
    assert sum(section.size for section in layout.sections) == layout.input_ids.numel()
    assert [s for s in layout.sections if not s.padding] == [
        Section(7, (1, 2, 3)), Section(5, (3, 4)), Section(2, (6,)), Section(4, ()), Section(1, (2, 0)),
    ]  # fmt: skip
    flat = layout.group.flatten()
    begin = 0
    for section in layout.sections:
        assert (flat[begin : begin + section.size] == -1).all() == section.padding
        begin += section.size


@pytest.mark.parametrize(("name", "masks"), [("llama", 0), ("gemma3", 1)])
def test_a_model_whose_layers_see_less_than_a_group_gets_masks(name, masks, monkeypatch):
    model = build(DENSE[name]())
    window = getattr(model.config, "sliding_window", None) or 10**6
    engine = LogProbEngine(model, path="shared")
    engine.verify()
    seen = []
    monkeypatch.setattr(engine, "_masks", lambda layout, old=engine._masks: seen.append(layout) or old(layout))
    length = min(window, 20)
    engine(batch_of([(length, (length, 2))]))
    assert len(seen) == masks


def test_gradients_under_autocast_are_those_of_half_precision():
    layout = pack(batch_of(BATCHES["ragged"]), 0)
    shape = (*layout.input_ids.shape, HEADS, SIZE)
    inputs = [torch.randn(shape).transpose(1, 2) for _ in range(3)]
    found = []
    for autocast in (True, False):
        own = [(t if autocast else t.bfloat16()).clone().requires_grad_() for t in inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = attend(layout, *own)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        found.append([t.grad.bfloat16() for t in own])
    for mixed, half in zip(*found, strict=True):
        assert torch.equal(mixed, half)
