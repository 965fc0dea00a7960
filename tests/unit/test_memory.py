"""The estimate against numbers by hand and against the bytes of a real model, its gradients and its optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import nn

from alignment import memory
from alignment.batches import Group, GroupBatch
from alignment.logprobs import LogProbEngine
from alignment.memory import Plan, available, estimate
from alignment.memory_report import advice, report, size
from alignment.optim import OptimConfig, build_optimizer
from alignment.policy import LoRAConfig, PolicyConfig, load_policy

SMALL = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# Embedding 1000 x 64, last norm 64; a layer has q and o 64 x 64, k and v 64 x 32, three matrices 64 x 128, two norms.
LINEAR = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # 110,592
PARAMETERS = 1000 * 64 + 64 + LINEAR + 3 * 2 * 64  # 175,040
BIG = SMALL | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "vocab_size": 128_000}


def plan(arch: dict[str, object] = SMALL, **settings: object) -> Plan:
    own = {k: settings.pop(k) for k in ("optim", "micro_batch_tokens", "reference", "row_tokens") if k in settings}
    return Plan(policy=PolicyConfig(arch=arch, **settings), **own)


def test_numbers_by_hand() -> None:
    found = estimate(plan(micro_batch_tokens=100, row_tokens=10, reference="copy"))
    assert found.parameters == found.trainable == PARAMETERS == 175_040
    assert found.weights == found.gradients == found.reference == 700_160
    tensors = 2 + 3 * 9  # each with a 4-byte step counter in AdamW
    assert found.optimizer == 2 * 700_160 + 4 * tensors
    # A layer: 6 x 64 (norms) + 4 x 64 (attention) + 4 x 128 (MLP) + 10 (mask) = 1,162 values a token; 3 x 64 after.
    assert found.activations == 100 * 4 * (3 * 1162 + 3 * 64)
    assert found.logits == 100 * 1000 * 4
    assert found.total == 3 * 700_160 + found.optimizer + found.activations + found.logits


def test_logits_are_kept_up_to_a_bound_and_by_the_shared_path_alone() -> None:
    assert estimate(plan(BIG, micro_batch_tokens=8192)).logits == 128 << 20
    assert estimate(plan(BIG, micro_batch_tokens=8192, logprob_path="plain")).logits == 0
    assert estimate(plan(BIG, micro_batch_tokens=8192, optim=None)).logits == 0


def test_bf16_by_hand() -> None:
    found = estimate(plan(micro_batch_tokens=100, row_tokens=10, dtype="bfloat16"))
    assert found.weights == found.gradients == 350_080
    assert found.activations == 100 * 2 * (3 * (8 * 64 + 4 * 64 + 4 * 128 + 10) + 3 * 64)


def test_a_model_without_attention_by_hand() -> None:
    """Mamba: no heads, and an inner width of twice the hidden size."""
    mamba = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 3}
    found = estimate(plan(mamba, micro_batch_tokens=100, row_tokens=10))
    assert found.activations == 100 * 4 * (3 * (6 * 64 + 4 * 128 + 10) + 3 * 64)


def test_the_widest_layer_counts_where_widths_differ() -> None:
    """Gemma 3n gives one MLP width a layer."""
    widths = {"model_type": "gemma3n_text", "intermediate_size": [64, 128], "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size_per_layer_input": 8,
              "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0, "laurel_rank": 4}  # fmt: skip
    found = estimate(plan(widths, micro_batch_tokens=100, row_tokens=10))
    assert found.activations == 100 * 4 * (2 * (6 * 64 + 4 * 64 + 4 * 128 + 10) + 3 * 64)


def test_gradient_checkpointing_by_hand() -> None:
    found = estimate(plan(micro_batch_tokens=100, row_tokens=10, gradient_checkpointing=True))
    assert found.activations == 100 * 4 * (3 * 64 + 1162 + 3 * 64)


def test_lora_and_4_bits_by_hand() -> None:
    found = estimate(plan(lora=LoRAConfig(r=8), quantization="4bit"))
    # A pair of thin matrices on each of the seven linear layers: r (in + out).
    adapter = 3 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert found.trainable == adapter == 24_576
    assert found.gradients == 4 * adapter
    # Half a byte a weight, a byte every 64, a float every 256 of those: here one for each of the 21 matrices.
    floats = 3 * 7
    assert found.weights == LINEAR // 2 + LINEAR // 64 + 4 * floats + 4 * (PARAMETERS - LINEAR) + 4 * adapter


def test_a_reference_costs_what_its_kind_adds() -> None:
    lora = LoRAConfig(r=8)
    costs = {k: estimate(plan(lora=lora, reference=k)).reference for k in ("none", "adapter_off", "cached")}
    assert set(costs.values()) == {0}
    assert estimate(plan(lora=lora, reference="frozen_adapter")).reference == 4 * 24_576


def test_nothing_is_trained_without_an_optimizer() -> None:
    found = estimate(plan(optim=None))
    assert (found.gradients, found.optimizer, found.activations) == (0, 0, 0)
    assert found.total == 700_160


# -------------------------------------------------------------------------------------------------- against real bytes


def trained_bytes(config: PolicyConfig, optim: OptimConfig) -> tuple[int, int, int]:
    """Bytes that weights, gradients and optimizer state really occupy after a step."""
    policy = load_policy(config)
    optimizer = build_optimizer(policy.named_parameters(), optim, lr=1e-3)
    policy(torch.tensor([[1, 5, 9]])).logits.sum().backward()
    gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
    optimizer.step()
    state = sum(
        value.nbytes
        for per_tensor in optimizer.state.values()
        for name, value in per_tensor.items()
        if isinstance(value, torch.Tensor) and not name.startswith("qmap")  # one shared table of 256 values
    )
    return sum(p.nbytes for p in policy.parameters()), gradients, state


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw_8bit", "lion_8bit", "ademamix_8bit"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=64)], ids=["full", "lora"])
def test_the_tiny_model_takes_exactly_what_was_estimated(optimizer: str, lora: LoRAConfig | None) -> None:
    config, optim = PolicyConfig(lora=lora), OptimConfig(optimizer=optimizer)
    found = estimate(Plan(policy=config, optim=optim))
    assert (found.weights, found.gradients, found.optimizer) == trained_bytes(config, optim)


def test_momentum_is_counted() -> None:
    optim = OptimConfig(optimizer="sgd", betas=(0.9, 0.0))
    assert estimate(Plan(policy=PolicyConfig(), optim=optim)).optimizer == trained_bytes(PolicyConfig(), optim)[2] > 0


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantised_base_takes_what_was_estimated(quantization: str) -> None:
    config = PolicyConfig(quantization=quantization, lora=LoRAConfig(r=4), dtype="bfloat16")
    policy = load_policy(config)
    actual = sum(p.nbytes for p in policy.parameters())
    for module in policy.modules():
        if isinstance(module, Linear4bit):
            actual += module.weight.quant_state.absmax.nbytes + module.weight.quant_state.state2.absmax.nbytes
        elif isinstance(module, Linear8bitLt):
            actual += module.weight.SCB.nbytes
    assert estimate(Plan(policy=config)).weights == actual


def test_a_pretrained_adapter_is_counted_with_its_own_rank(tmp_path: Path) -> None:
    load_policy(PolicyConfig(lora=LoRAConfig(r=3))).save_pretrained(tmp_path)
    continued = PolicyConfig(lora=LoRAConfig(pretrained=str(tmp_path)))
    assert estimate(Plan(policy=continued)) == estimate(Plan(policy=PolicyConfig(lora=LoRAConfig(r=3))))


def saved_bytes(config: PolicyConfig, batch: GroupBatch) -> int:
    """Bytes of the tensors that the forward pass keeps for the backward pass, parameters not counted."""
    policy = load_policy(config)
    engine = LogProbEngine(policy)
    engine.verify()
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = engine(batch).logps.sum()
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["full", "lora"])
def test_activations_are_within_ten_percent_of_what_autograd_keeps(
    dtype: str, layers: int, lora: LoRAConfig | None
) -> None:
    arch = SMALL | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": layers}
    config = PolicyConfig(arch=arch, dtype=dtype, lora=lora)
    batch = GroupBatch.from_groups([Group(prompt=[1] * 128, completions=[[5] * 64, [6] * 64])])
    expected = estimate(Plan(policy=config, micro_batch_tokens=256, masks=False)).activations
    logits = 128 * 1000 * (4 if dtype == "float32" else 2)  # of the two completions
    assert saved_bytes(config, batch) == pytest.approx(expected + logits, rel=0.1)


# ------------------------------------------------------------------------------------------------------ machine, advice


def test_memory_of_the_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 8 << 30})())
    assert available(cpu) == 8 << 30
    (tmp_path / "memory.current").write_text("1073741824\n")
    (tmp_path / "memory.max").write_text("3221225472\n")
    assert available(cpu) == 2 << 30
    assert available(cpu, processes=2) == 1 << 30
    (tmp_path / "memory.max").write_text("max\n")
    assert available(cpu) == 8 << 30


def test_a_plan_that_fits_gets_no_advice() -> None:
    text = report(plan(reference="cached"), limit=1 << 30)
    assert "175,040 parameters, float32" in text
    assert "fit" not in text


def test_each_setting_that_would_make_it_fit_is_named_with_its_bytes() -> None:
    start = plan(BIG, micro_batch_tokens=8192, row_tokens=1024, reference="copy")
    total = estimate(start).total
    options = dict(advice(start, total - 1))
    assert set(options) == {
        "micro_batch_tokens=4096",
        "policy.gradient_checkpointing=true",
        "optim.optimizer=adamw_8bit",
        "reference=cached",
        "reference=fp8",
        "policy.dtype=bfloat16",
        "policy.lora.r=16",
        "policy.lora.r=16 policy.quantization=4bit",
    }
    cached = plan(BIG, micro_batch_tokens=8192, row_tokens=1024, reference="cached")
    assert options["reference=cached"] == estimate(cached).total == total - estimate(start).weights
    text = report(start, total - 1, where="GPU 0")
    assert f"  reference=cached: {size(options['reference=cached'])}" in text
    assert "GPU 0" in text


def test_only_settings_that_fit_are_named_and_the_largest_micro_batch_that_does() -> None:
    start = plan(BIG, micro_batch_tokens=8192, row_tokens=1024)
    smaller = plan(BIG, micro_batch_tokens=1024, row_tokens=1024)
    options = dict(advice(start, estimate(smaller).total))
    assert "micro_batch_tokens=1024" in options
    assert not {"micro_batch_tokens=4096", "micro_batch_tokens=512"} & set(options)
    assert all(total <= estimate(smaller).total for total in options.values())


def test_settings_are_combined_when_one_is_not_enough() -> None:
    start = plan(BIG, micro_batch_tokens=8192, row_tokens=1024, reference="copy")
    both = plan(BIG, micro_batch_tokens=8192, row_tokens=1024, lora=LoRAConfig(), quantization="4bit",
                reference="adapter_off", gradient_checkpointing=True)  # fmt: skip
    ((names, total),) = advice(start, estimate(both).total)
    assert len(names.split()) >= 3
    assert total <= estimate(both).total
    ((_, least),) = advice(start, 1 << 20)
    assert least > 1 << 20
    assert "still too much" in report(start, 1 << 20)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen3", "qwen3_moe", "gemma3_text", "opt"])
def test_other_architectures_are_counted(model_type: str) -> None:
    arch = {"model_type": model_type, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    arch |= {"opt": {"word_embed_proj_dim": 32, "ffn_dim": 64}, "gemma3_text": {"head_dim": 16}}.get(model_type, {})
    arch |= {"intermediate_size": 64, "num_key_value_heads": 2} if model_type not in ("gpt2", "opt") else {}
    arch |= {"num_experts": 4, "moe_intermediate_size": 16} if model_type == "qwen3_moe" else {}
    config = PolicyConfig(arch=arch)
    found = estimate(Plan(policy=config))
    policy: nn.Module = load_policy(config)
    assert found.parameters == sum(p.numel() for p in policy.parameters())
    assert found.weights == sum(p.nbytes for p in policy.parameters())
    assert found.activations > 4096 * 4 * 2 * 6 * 32


@pytest.mark.parametrize(("count", "text"), [(3 << 29, "1.5 GiB"), (300 << 20, "300.0 MiB"), (12 << 10, "12.0 KiB")])
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text
