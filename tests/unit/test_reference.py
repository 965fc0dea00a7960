"""C9 and C10: every kind of reference is the policy as training found it, and cached values belong to their rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.logprobs import LogProbEngine
from alignment.policy import LoRAConfig, PolicyConfig, load_policy, load_tokenizer
from alignment.reference import Reference
from alignment.reference_cache import row_keys, tokenizer_digest
from alignment.tiny import tiny_model

BETA = 0.1


def groups() -> list[Group]:
    """Six preference pairs with prompts and completions of different lengths, one with an unscored token."""
    pairs = []
    for i in range(6):
        chosen, rejected = [30 + i, 50 + i, 3], [40 + 2 * i] * (1 + i % 3) + [3]
        scored = [[True] * 3, [i != 2] + [True] * (len(rejected) - 1)]
        pairs.append(Group(prompt=[1, *range(60, 62 + i)], completions=[chosen, rejected], scored=scored, index=i))
    return pairs


def batches(rows: Sequence[Group], size: int = 2) -> list[GroupBatch]:
    return [GroupBatch.from_groups(rows[i : i + size]) for i in range(0, len(rows), size)]


def logps(policy: nn.Module, batch: GroupBatch) -> Tensor:
    values = LogProbEngine(policy)(batch).logps
    assert values is not None
    return values


def dpo_loss(policy: Tensor, reference: Tensor, batch: GroupBatch) -> float:
    chosen, rejected = batch.pair(batch.sum_tokens(policy - reference))
    return float(-nn.functional.logsigmoid(BETA * (chosen - rejected)).mean())


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """A trained adapter: B is not zero."""
    policy = load_policy(PolicyConfig(lora=LoRAConfig(r=4)))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    policy.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def build(kind: str, config: PolicyConfig, policy: nn.Module, folder: Path, **options: Any) -> Reference:
    reference = Reference.build(kind, policy, config, LogProbEngine, **options)
    reference.precompute(batches(groups()), folder / "cache", {"max": 32}, micro_batch_tokens=24)
    return reference


def lora_config(kind: str, adapter: str) -> PolicyConfig:
    return PolicyConfig(lora={"new": LoRAConfig(r=4), "pretrained": LoRAConfig(pretrained=adapter), "none": None}[kind])


# ------------------------------------------------------------------------------------------------------------------ C9


@pytest.mark.parametrize(
    ("lora", "kind", "resolved"),
    [
        ("new", "auto", "adapter_off"),
        ("pretrained", "auto", "frozen_adapter"),
        ("none", "auto", "cached"),
        ("new", "cached", "cached"),
        ("pretrained", "cached", "cached"),
        ("new", "frozen_adapter", "frozen_adapter"),
        ("new", "copy", "copy"),
        ("pretrained", "copy", "copy"),
        ("none", "copy", "copy"),
    ],
)
def test_c9_at_step_0_every_reference_is_the_policy(
    tmp_path: Path, adapter: str, lora: str, kind: str, resolved: str
) -> None:
    config = lora_config(lora, adapter)
    policy = load_policy(config)
    trainable = [n for n, p in policy.named_parameters() if p.requires_grad]
    reference = build(kind, config, policy, tmp_path, finite_data=True)
    assert reference.kind == resolved
    batch = GroupBatch.from_groups(groups())
    ours, theirs = logps(policy, batch), reference.token_logps(batch)
    assert theirs.dtype == torch.float32
    assert theirs.grad_fn is None
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    assert batch.sum_tokens(ours - theirs).abs().max() < 1e-4  # rewards and KL are 0
    assert dpo_loss(ours, theirs, batch) == pytest.approx(math.log(2), abs=1e-5)
    assert [n for n, p in policy.named_parameters() if p.requires_grad] == trainable
    assert policy.training


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [60, 61]},
        {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    ],
    ids=["embedding", "whole embedding", "some tokens", "DoRA"],
)
def test_every_part_of_a_pretrained_adapter_is_in_its_frozen_copy(tmp_path: Path, settings: dict[str, Any]) -> None:
    policy = get_peft_model(tiny_model(), LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    batch = GroupBatch.from_groups(groups())
    start = logps(policy, batch).detach()
    policy.save_pretrained(tmp_path / "whole")
    config = PolicyConfig(lora=LoRAConfig(pretrained=str(tmp_path / "whole")))
    policy = load_policy(config)
    reference = Reference.build("frozen_adapter", policy, config, LogProbEngine)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    assert (logps(policy, batch) - start).abs().max() > 0.01
    assert torch.allclose(reference.token_logps(batch), start, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lora", "kind"),
    [("new", "auto"), ("pretrained", "auto"), ("pretrained", "cached"), ("pretrained", "copy"), ("none", "copy")],
)
def test_c9_the_reference_stays_when_the_policy_moves(tmp_path: Path, adapter: str, lora: str, kind: str) -> None:
    """Also: a pretrained adapter is compared with itself, not with the base, and switching leaves it trainable."""
    config = lora_config(lora, adapter)
    policy = load_policy(config)
    reference = build(kind, config, policy, tmp_path)
    batch = GroupBatch.from_groups(groups())
    start = reference.token_logps(batch)
    base = logps(load_policy(PolicyConfig()), batch)
    assert ((start - base).abs().max() > 0.01) == (lora == "pretrained")
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        ours = logps(policy, batch)
        reference.token_logps(batch)  # switching adapters while a graph is alive must not lose its gradients
        optimizer.zero_grad()
        (-batch.pair(batch.sum_tokens(ours))[0].mean()).backward()
        optimizer.step()
    assert (logps(policy, batch) - start).abs().max() > 0.01
    assert torch.allclose(reference.token_logps(batch), start, atol=1e-5)


def test_an_adapter_switched_off_would_not_be_the_start_of_a_pretrained_one(adapter: str) -> None:
    config = lora_config("pretrained", adapter)
    with pytest.raises(UserError, match="use frozen_adapter, cached or copy"):
        Reference.build("adapter_off", load_policy(config), config, LogProbEngine)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("adapter_off", "needs policy.lora"), ("frozen_adapter", "needs policy.lora"), ("ema", "one of")],
)
def test_kinds_that_do_not_fit(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Reference.build(kind, load_policy(PolicyConfig()), PolicyConfig(), LogProbEngine)


def test_rollouts_get_a_copy() -> None:
    assert Reference.build("auto", load_policy(PolicyConfig()), PolicyConfig(), LogProbEngine).kind == "copy"


def test_dropout_does_not_act_on_a_reference(tmp_path: Path) -> None:
    arch = {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    arch |= {"intermediate_size": 32, "attention_dropout": 0.5}
    batch = GroupBatch.from_groups(groups())
    for lora in (None, LoRAConfig(r=2, dropout=0.5)):
        config = PolicyConfig(arch=arch, dropout=True, lora=lora)
        reference = build("auto", config, load_policy(config), tmp_path)
        assert torch.equal(reference.token_logps(batch), reference.token_logps(batch))


def test_a_copy_follows_the_policy_to_another_dtype() -> None:
    policy = load_policy(PolicyConfig())
    reference = Reference.build("copy", policy, PolicyConfig(), LogProbEngine)
    policy.to(torch.bfloat16)
    batch = GroupBatch.from_groups(groups())
    assert torch.equal(reference.token_logps(batch), logps(policy, batch))


def test_a_4bit_base_under_new_adapters(tmp_path: Path) -> None:
    config = PolicyConfig(lora=LoRAConfig(r=4), quantization="4bit")
    policy = load_policy(config)
    batch = GroupBatch.from_groups(groups())
    for kind in ("adapter_off", "cached", "copy"):
        reference = build(kind, config, policy, tmp_path)
        assert torch.allclose(reference.token_logps(batch), logps(policy, batch), atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------- C10


class Counting(LogProbEngine):
    """An engine that counts what it computes."""

    calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        Counting.calls += 1
        return super().__call__(*args, **options)


def computed(folder: Path, config: PolicyConfig, rows: Sequence[Group], parts: dict[str, Any]) -> int:
    """How often the model ran to prepare these rows: 0 is a hit."""
    Counting.calls = 0
    reference = Reference.build("cached", load_policy(config), config, Counting)
    reference.precompute(batches(rows), folder, parts)
    return Counting.calls


def test_c10_what_misses_the_cache(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(PolicyConfig())
    parts = {"tokenizer": tokenizer_digest(tokenizer), "max_tokens": 64}
    assert computed(tmp_path, PolicyConfig(), groups(), parts) == 3
    assert computed(tmp_path, PolicyConfig(), groups(), parts) == 0
    assert computed(tmp_path, PolicyConfig(), groups()[::-1], parts) == 0, "the order of the rows does not matter"
    assert computed(tmp_path, PolicyConfig(init_seed=1), groups(), parts) == 3, "another model"
    assert computed(tmp_path, PolicyConfig(), groups(), parts | {"max_tokens": 65}) == 3, "another maximum length"
    tokenizer.add_tokens(["new"])
    other = parts | {"tokenizer": tokenizer_digest(tokenizer)}
    assert computed(tmp_path, PolicyConfig(), groups(), other) == 3, "another tokenizer"
    token = groups()
    token[4] = Group(prompt=token[4].prompt, completions=[[31, 3], token[4].completions[1]], index=4)
    assert computed(tmp_path, PolicyConfig(), token, parts) == 3, "one changed row"
    mask = groups()
    scored = [[False, True, True], [True] * 3]
    mask[4] = Group(prompt=mask[4].prompt, completions=mask[4].completions, scored=scored, index=4)
    assert computed(tmp_path, PolicyConfig(), mask, parts) == 3, "one changed mask"
    assert computed(tmp_path, PolicyConfig(), groups()[:5], parts) == 3, "one row less"
    assert computed(tmp_path, PolicyConfig(), groups(), parts) == 0, "the first file is still there"


def test_the_tokenizers_digest_sees_its_template_and_specials() -> None:
    tokenizer = load_tokenizer(PolicyConfig())
    first = tokenizer_digest(tokenizer)
    assert tokenizer_digest(load_tokenizer(PolicyConfig())) == first
    tokenizer.chat_template = "{{ messages }}"
    second = tokenizer_digest(tokenizer)
    tokenizer.eos_token = "<bos>"
    assert len({first, second, tokenizer_digest(tokenizer)}) == 3


def test_c10_shuffled_rows_keep_their_own_values(tmp_path: Path) -> None:
    policy = load_policy(PolicyConfig())
    reference = build("cached", PolicyConfig(), policy, tmp_path)
    shuffled = GroupBatch.from_groups([groups()[i] for i in (4, 0, 5, 2)])
    assert torch.allclose(reference.token_logps(shuffled), logps(policy, shuffled), atol=1e-5, rtol=0)
    part = shuffled.select_rows([1, 2, 7])
    assert torch.allclose(reference.token_logps(part), logps(policy, part), atol=1e-5, rtol=0)
    assert reference.token_logps(GroupBatch.from_groups([])).shape == (0,)


def train(reference: Reference, policy: nn.Module, seed: int) -> list[float]:
    """DPO losses of four steps over shuffled pairs."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    losses = []
    engine = LogProbEngine(policy)
    for order in torch.randperm(6, generator=torch.Generator().manual_seed(seed)).split(2) * 2:
        batch = GroupBatch.from_groups([groups()[i] for i in order.tolist()])
        ours = engine(batch).logps
        chosen, rejected = batch.pair(batch.sum_tokens(ours - reference.token_logps(batch)))
        loss = -nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_c10_the_same_losses_with_and_without_the_cache(tmp_path: Path) -> None:
    runs = []
    for kind in ("cached", "copy", "cached"):
        policy = load_policy(PolicyConfig())
        state = torch.get_rng_state()
        runs.append(train(build(kind, PolicyConfig(), policy, tmp_path), policy, seed=0))
        assert torch.equal(torch.get_rng_state(), state), "preparing a reference moved the global random state"
    assert runs[0] == pytest.approx(runs[1], abs=1e-5)
    assert runs[0] == runs[2], "computed and read values are the same bits"
    assert runs[0][-1] < runs[0][0] - 1e-3


def test_a_moved_policy_finds_the_file_and_without_it_the_start_is_loaded_again(tmp_path: Path) -> None:
    """What a resumed run does: the reference is built first, then the checkpoint is restored."""
    batch = GroupBatch.from_groups(groups())
    start = logps(load_policy(PolicyConfig()), batch).detach()
    for _ in ("computed", "read"):
        policy = load_policy(PolicyConfig())
        reference = Reference.build("cached", policy, PolicyConfig(), LogProbEngine)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
        reference.precompute(batches(groups()), tmp_path, {})
        assert torch.allclose(reference.token_logps(batch), start, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lora", "kind"), [("new", "auto"), ("pretrained", "auto"), ("none", "cached"), ("none", "copy")]
)
def test_entropies_of_every_kind(tmp_path: Path, adapter: str, lora: str, kind: str) -> None:
    """Those of the starting policy, without gradient, also after it has moved; log-probs come with them."""
    config = lora_config(lora, adapter)
    policy = load_policy(config)
    reference = build(kind, config, policy, tmp_path, entropy=True)
    batch = GroupBatch.from_groups(groups())
    with torch.no_grad():
        start = LogProbEngine(policy)(batch, entropy=True)
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
        assert start.entropy is not None
        assert start.logps is not None
    found_logps, found = reference.token_stats(batch)
    assert torch.allclose(found, start.entropy, atol=1e-5, rtol=0)
    assert torch.allclose(found_logps, start.logps, atol=1e-5, rtol=0)
    assert torch.equal(found_logps, reference.token_logps(batch))
    assert not found.requires_grad
    assert bool((found[~batch.scored] == 0).all())
    assert float(found[batch.scored].min()) > 0


def test_cached_entropies_are_read_again_and_go_with_their_rows(tmp_path: Path) -> None:
    policy = load_policy(PolicyConfig())
    first = build("cached", PolicyConfig(), policy, tmp_path, entropy=True)
    Counting.calls = 0
    again = Reference.build("cached", policy, PolicyConfig(), Counting, entropy=True)
    again.precompute(batches(groups()[::-1]), tmp_path / "cache", {"max": 32})
    assert Counting.calls == 0
    shuffled = GroupBatch.from_groups([groups()[i] for i in (4, 0, 5)])
    for a, b in zip(again.token_stats(shuffled), first.token_stats(shuffled), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        entropy = LogProbEngine(policy)(shuffled, entropy=True).entropy
    assert entropy is not None
    assert torch.allclose(again.token_stats(shuffled)[1], entropy, atol=1e-5, rtol=0)


def test_a_cache_without_entropies_says_so(tmp_path: Path) -> None:
    """And its file is not taken for one with them."""
    policy = load_policy(PolicyConfig())
    without = build("cached", PolicyConfig(), policy, tmp_path)
    with pytest.raises(UserError, match="has log-probs and no entropies; precompute both, or use copy"):
        without.token_stats(GroupBatch.from_groups(groups()))
    both = build("cached", PolicyConfig(), policy, tmp_path, entropy=True)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2
    assert both.token_stats(GroupBatch.from_groups(groups()))[1].sum() > 0


def test_unknown_rows_and_a_forgotten_precompute_are_named(tmp_path: Path) -> None:
    reference = build("cached", PolicyConfig(), load_policy(PolicyConfig()), tmp_path)
    new = Group(prompt=[1, 2], completions=[[5]], index=77)
    with pytest.raises(UserError, match="row 77 is not among the cached"):
        reference.token_logps(GroupBatch.from_groups([groups()[0], new]))
    with pytest.raises(UserError, match=r"call precompute\(\)"):
        Reference.build("cached", load_policy(PolicyConfig()), PolicyConfig(), LogProbEngine).token_logps(
            GroupBatch.from_groups(groups())
        )


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_a_damaged_file_is_noticed_and_computed_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    assert computed(folder, PolicyConfig(), groups(), {}) == 3
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-20] ^= 1
    elif damage == "swap":  # a good file, of other rows, under this name
        computed(folder, PolicyConfig(), groups()[:2], {})
        data = next(f for f in folder.iterdir() if f != file).read_bytes()
    file.write_bytes({"cut": data[:-8], "empty": b""}.get(damage, data))
    with caplog.at_level(logging.WARNING):
        assert computed(folder, PolicyConfig(), groups(), {}) == 3
    assert f"{file} is damaged" in caplog.text
    assert computed(folder, PolicyConfig(), groups(), {}) == 0
    assert not list(folder.glob("*partial*"))


def test_a_cache_that_cannot_be_written_is_not_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    policy = load_policy(PolicyConfig())
    reference = build("cached", PolicyConfig(), policy, tmp_path)
    assert "cannot be written" in caplog.text
    batch = GroupBatch.from_groups(groups())
    assert torch.allclose(reference.token_logps(batch), logps(policy, batch), atol=1e-5)


def test_row_keys_see_prompt_completion_and_mask() -> None:
    rows = [
        Group(prompt=[1, 2], completions=[[3, 4]]),
        Group(prompt=[1], completions=[[2, 3, 4]]),
        Group(prompt=[1, 2, 3], completions=[[4]]),
        Group(prompt=[1, 2], completions=[[3, 4]], scored=[[False, True]]),
        Group(prompt=[1, 2], completions=[[3, 5]]),
    ]
    keys = row_keys(GroupBatch.from_groups(rows))
    assert len(set(keys)) == 5
    assert keys[:1] == row_keys(GroupBatch.from_groups(rows[:1]))
    assert all(0 <= k < 2**63 for k in keys)
