"""What a critic adds to the estimate, by hand and against the bytes of a real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.critic import CriticConfig
from alignment.errors import UserError
from alignment.memory import Plan, estimate
from alignment.memory_report import advice, report, size
from alignment.optim import OptimConfig, build_optimizer
from alignment.policy import LoRAConfig, PolicyConfig
from tests.critics import COPY, KINDS, built, classifier, configs
from tests.toys import groups

SMALL = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Embedding 1000 x 64, last norm 64; a layer has q and o 64 x 64, k and v 64 x 32, three matrices 64 x 128, two norms.
LINEAR = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
TRUNK = 1000 * 64 + 64 + LINEAR + 3 * 2 * 64  # 175,040, in 2 + 3 x 9 tensors
LAYERS = 100 * 4 * (3 * (6 * 64 + 4 * 64 + 4 * 128 + 10) + 3 * 64)  # activations of 100 tokens in rows of 10
HEAD = 64 * 4  # bytes
HEAD_TRAINING = HEAD + (2 * HEAD + 4) + 100 * HEAD  # gradient, AdamW, states


def plan(critic: CriticConfig | None, arch: dict[str, Any] = SMALL, **settings: Any) -> Plan:
    own = {k: settings.pop(k) for k in ("optim",) if k in settings}
    policy = PolicyConfig(arch=arch, **settings)
    return Plan(policy=policy, critic=critic, micro_batch_tokens=100, row_tokens=10, **own)


def test_a_head_by_hand() -> None:
    found = estimate(plan(CriticConfig()))
    assert found.critic == HEAD + HEAD_TRAINING == 256 + 256 + 516 + 25_600
    assert estimate(plan(None)) == replace(found, critic=0)
    assert found.total == estimate(plan(None)).total + found.critic
    assert estimate(plan(CriticConfig(), optim=None)).critic == HEAD


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_copy_by_hand(tied: bool) -> None:
    """The LM head stays behind, whether it is the embedding or a matrix of its own."""
    found = estimate(plan(COPY, SMALL | {"tie_word_embeddings": tied}))
    assert found.parameters == TRUNK + (0 if tied else 64_000)
    weights = 4 * TRUNK
    assert found.critic == HEAD + HEAD_TRAINING + 2 * weights + (2 * weights + 4 * 29) + LAYERS
    assert estimate(plan(COPY, optim=None)).critic == HEAD + weights


def test_a_copy_with_lora_and_4_bits_by_hand() -> None:
    found = estimate(plan(COPY, lora=LoRAConfig(r=8), quantization="4bit"))
    adapter = 3 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))  # in 3 x 14 tensors
    base = LINEAR // 2 + LINEAR // 64 + 4 * 3 * 7 + 4 * (TRUNK - LINEAR)
    layers = 100 * 4 * (3 * (4 * 64 + 4 * 64 + 4 * 128 + 10) + 3 * 64)
    trained = 4 * adapter + (2 * 4 * adapter + 4 * 3 * 14)
    assert found.critic == HEAD + HEAD_TRAINING + base + 4 * adapter + trained + layers


def test_gradient_checkpointing_holds_for_the_copy_too() -> None:
    less = estimate(plan(COPY)).critic - estimate(plan(COPY, gradient_checkpointing=True)).critic
    assert less == 100 * 4 * (3 * 1162 - (3 * 64 + 1162))


def test_no_logits_of_a_critic() -> None:
    """The plain path adds logits to the policy's activations alone."""
    shared, plain = (estimate(plan(COPY, logprob_path=path)) for path in ("shared", "plain"))
    assert plain.activations - shared.activations == 100 * 1000 * (4 + 8)
    assert plain.critic == shared.critic


@pytest.mark.parametrize(
    "settings", [{}, {"lora": LoRAConfig(r=4)}, {"lora": LoRAConfig(r=4), "quantization": "4bit"}], ids=str
)
def test_a_reward_model_is_counted_in_its_own_size_and_in_full(
    settings: dict[str, Any], tmp_path: Path, tiny_tokenizer
) -> None:
    """The tiny Llama: 512 x 96 embedding, q and o 96 x 96, k and v 96 x 48, MLP 3 x 96 x 256, beside any policy."""
    classifier(tmp_path, tiny_tokenizer)
    critic = CriticConfig(kind="reward_model", reward_model=str(tmp_path))
    trunk = 512 * 96 + 96 + 2 * (2 * 96 * 96 + 2 * 96 * 48 + 3 * 96 * 256 + 2 * 96)
    layers = 100 * 4 * (2 * (6 * 96 + 4 * 96 + 4 * 256 + 10) + 3 * 96)
    head = 96 * 4
    head_training = head + (2 * head + 4) + 100 * head
    expected = head + head_training + 4 * trunk * 4 + 4 * 20 + layers  # weights, gradients, AdamW of 20 tensors
    assert estimate(plan(critic, **settings)).critic == expected
    half = estimate(plan(critic, dtype="bfloat16", optim=None, **settings))
    assert half.critic == head + 2 * trunk


def test_what_cannot_be_a_critic_is_said_before_anything_is_read(tmp_path: Path, tiny_tokenizer) -> None:
    classifier(tmp_path, tiny_tokenizer, labels=2)
    with pytest.raises(UserError, match="has 2 outputs"):
        estimate(plan(CriticConfig(kind="reward_model", reward_model=str(tmp_path))))
    with pytest.raises(UserError, match="no model folder"):
        estimate(plan(CriticConfig(kind="reward_model", reward_model=str(tmp_path / "nowhere"))))


def test_the_report_names_it_and_what_needs_less() -> None:
    start = plan(COPY)
    without = estimate(plan(CriticConfig()))
    options = dict(advice(start, estimate(start).total - 1))
    assert options["critic.kind=head"] == without.total
    text = report(start, estimate(start).total - 1)
    assert f"  critic      {size(estimate(start).critic):>10}  copy" in text
    assert f"  critic.kind=head: {size(without.total)}" in text
    assert "critic" not in report(plan(None), 1)
    assert "critic.kind" not in report(plan(CriticConfig()), 1)


# -------------------------------------------------------------------------------------------------- against real bytes


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    classifier(folder, tiny_tokenizer)
    return folder


@pytest.mark.parametrize("optimizer", ["adamw", "lion_8bit"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=64)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_takes_exactly_what_was_estimated(
    kind: str, lora: LoRAConfig | None, optimizer: Any, reward_folder: Path
) -> None:
    """Without tokens there are no activations: what is left are weights, gradients and optimizer state."""
    policy, optim, critic = PolicyConfig(lora=lora), OptimConfig(optimizer=optimizer), configs(reward_folder)[kind]
    module = built(policy, critic)
    torch.nn.init.ones_(module.critic.head.weight)
    own = build_optimizer(module.critic.named_parameters(), optim, lr=1e-3)
    module.values(GroupBatch.from_groups(groups(2, 2))).sum().backward()
    gradients = sum(p.grad.nbytes for p in module.critic.parameters() if p.grad is not None)
    own.step()
    state = sum(
        value.nbytes
        for per_tensor in own.state.values()
        for name, value in per_tensor.items()
        if isinstance(value, torch.Tensor) and not name.startswith("qmap")  # one shared table of 256 values
    )
    weights = sum(p.nbytes for p in module.critic.parameters())
    found = estimate(Plan(policy=policy, critic=critic, optim=optim, micro_batch_tokens=0))
    assert found.critic == weights + gradients + state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_within_ten_percent_of_what_autograd_keeps(
    kind: str, lora: LoRAConfig | None, dtype: Any, reward_folder: Path
) -> None:
    policy, critic = PolicyConfig(lora=lora, dtype=dtype), configs(reward_folder)[kind]
    module = built(policy, critic)
    batch = GroupBatch.from_groups([Group(prompt=[1] * 8, completions=[[5] * 124, [6] * 124])])
    states = module.engine(batch, logps=False, hidden="before").hidden if kind == "head" else None
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        values = module.critic(batch, states)
    assert values.requires_grad
    plan = Plan(policy=policy, critic=critic, masks=False)
    full, none = (estimate(replace(plan, micro_batch_tokens=tokens)).critic for tokens in (256, 0))
    assert sum(kept.values()) == pytest.approx(full - none, rel=0.1)
