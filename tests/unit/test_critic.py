"""Values against a plain forward pass of transformers, row by row; reward models as critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from alignment.batches import Group, GroupBatch
from alignment.causal_lm import decoder_of
from alignment.checkpoint import SafeCheckpointIO
from alignment.critic import CriticConfig
from alignment.errors import UserError
from alignment.policy import LoRAConfig, PolicyConfig, base_model
from alignment.reward_export import export_reward
from alignment.rewards import SequenceClassifier
from modules import RewardModel
from tests.critics import COPY, HEAD, KINDS, LORA, UNTIED, built, classifier, configs
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

WIDTH = 96  # of the tiny model's states
VOCAB = 512


def moved(module: nn.Module, seed: int = 0) -> nn.Module:
    """With other trainable weights than it started from."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return module


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    classifier(folder, tiny_tokenizer)
    return folder


def by_hand(trunk: nn.Module, weight: Tensor, batch: GroupBatch) -> Tensor:
    """[C] one unpadded run of transformers' trunk for each completion; weight [H]."""
    prompts = torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())
    found = []
    with torch.no_grad():
        for group, ids in zip(
            batch.group_of, torch.split(batch.completion_ids, batch.completion_lengths.tolist()), strict=True
        ):
            row = torch.cat([prompts[group], ids])
            states = trunk(row[None]).last_hidden_state[0]
            first = len(prompts[group])
            found += [states[first + t - 1] @ weight for t in range(len(ids))]
    return torch.where(batch.scored, torch.stack(found), 0.0)


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("path", ["shared", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_the_head_on_the_state_before_the_token(kind: str, path: Any, reward_folder: Path) -> None:
    module = built(PolicyConfig(logprob_path=path), configs(reward_folder)[kind])
    weight = torch.linspace(-1, 1, WIDTH)
    with torch.no_grad():
        module.critic.head.weight.copy_(weight[None])
    batch = GroupBatch.from_groups(groups(5, 3))
    trunk = module.policy.model if kind == "head" else module.critic.trunk
    if kind == "reward_model":
        trunk = LlamaForSequenceClassification.from_pretrained(reward_folder).model
    values = module.values(batch)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, by_hand(trunk, weight, batch), atol=1e-4, rtol=0)
    assert (values[~batch.scored] == 0).all()


@pytest.mark.parametrize("kind", ["head", "copy"])
def test_the_first_value_is_that_of_the_prompt(kind: str, reward_folder: Path) -> None:
    """Also where the first token differs: nothing of it has been read yet."""
    module = built(TINY, configs(reward_folder)[kind])
    prompt = [1, 40, 41, 42]
    batch = GroupBatch.from_groups([Group(prompt=prompt, completions=[[50, 51], [60]])])
    with torch.no_grad():
        module.critic.head.weight.copy_(torch.linspace(-1, 1, WIDTH)[None])
        state = module.policy.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        values = module.values(batch)
    expected = float(state @ torch.linspace(-1, 1, WIDTH))
    assert values[[0, 2]].tolist() == pytest.approx([expected, expected], abs=1e-4)


@pytest.mark.parametrize("policy", [TINY, LORA], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("critic", [HEAD, COPY], ids=["head", "copy"])
def test_a_new_head_says_zero(policy: PolicyConfig, critic: CriticConfig) -> None:
    values = built(policy, critic).values(GroupBatch.from_groups(groups(3, 2)))
    assert values.abs().max() == 0
    assert values.requires_grad


@pytest.mark.parametrize("policy", [TINY, LORA, UNTIED], ids=["all weights", "LoRA", "untied"])
def test_a_copy_starts_as_the_policy_and_goes_its_own_way(policy: PolicyConfig) -> None:
    module = built(policy, COPY)
    batch = GroupBatch.from_groups(groups(4, 2))
    nn.init.normal_(module.critic.head.weight, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = module.engine(batch, logps=False, hidden="before").hidden
        before = module.critic(batch)
        expected = torch.where(batch.scored, states @ module.critic.head.weight[0], 0.0)
        torch.testing.assert_close(before, expected, atol=1e-5, rtol=0)
        moved(module.policy)
        after = module.engine(batch, logps=False, hidden="before").hidden
        assert not torch.allclose(after, states, atol=1e-2)
        assert torch.equal(module.critic(batch), before)
    own = {p.data_ptr() for p in module.policy.parameters()}
    assert not own & {p.data_ptr() for p in module.critic.parameters()}


ARCHITECTURES = {
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2},  # 16-wide states
    "bloom": {"hidden_size": 32, "n_layer": 2},  # no shared path
    "gemma2": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("critic", [HEAD, COPY], ids=["head", "copy"])
def test_other_architectures(model_type: str, critic: CriticConfig) -> None:
    arch = ARCHITECTURES[model_type] | {"model_type": model_type, "num_attention_heads": 4}
    module = built(PolicyConfig(arch=arch, attention="eager"), critic)
    nn.init.ones_(module.critic.head.weight)
    batch = GroupBatch.from_groups(groups(3, 2))
    expected = by_hand(decoder_of(base_model(module.policy)), torch.ones(module.critic.head.in_features), batch)
    torch.testing.assert_close(module.values(batch), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantised_policy_is_copied_as_it_is(bits: Any) -> None:
    module = built(PolicyConfig(lora=LoRAConfig(r=4), quantization=bits), COPY)
    nn.init.normal_(module.critic.head.weight, generator=torch.Generator().manual_seed(1))
    batch = GroupBatch.from_groups(groups(3, 2))
    with torch.no_grad():
        states = module.engine(batch, logps=False, hidden="before").hidden
        expected = torch.where(batch.scored, states.float() @ module.critic.head.weight[0], 0.0)
        torch.testing.assert_close(module.values(batch), expected, atol=1e-4, rtol=0)
    trained = {n for n, p in module.critic.named_parameters() if p.requires_grad}
    assert len(trained) == 29


@pytest.mark.parametrize("kind", KINDS)
def test_company_does_not_change_a_value(kind: str, reward_folder: Path) -> None:
    """Each completion by itself, in micro-batches, and all in one batch."""
    module = built(TINY, configs(reward_folder)[kind])
    nn.init.normal_(module.critic.head.weight, generator=torch.Generator().manual_seed(1))
    batch = GroupBatch.from_groups(groups(5, 3))
    batch = batch.with_tokens(at=torch.arange(len(batch.completion_ids)))
    with torch.no_grad():
        together = module.values(batch)
        alone = torch.cat([module.values(batch.select_rows([row])) for row in range(batch.num_completions)])
        cut = torch.zeros_like(together)
        for micro in batch.split(20, keep_groups=False):
            cut[micro.tokens["at"]] = module.values(micro)
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=0)
    torch.testing.assert_close(cut, together, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Group(prompt=[5], completions=[[], []])],
        [Group(prompt=[5, 6], completions=[[7, 8], [9]], scored=[[False, False], [False]])],
        [Group(prompt=[5, 6], completions=[])],
    ],
    ids=["no group", "no token", "nothing scored", "no completion"],
)
def test_nothing_to_value_gives_zeros_without_running_a_trunk(
    kind: str, rows: list[Group], reward_folder: Path
) -> None:
    module = built(TINY, configs(reward_folder)[kind])
    if kind != "head":
        module.critic.trunk.register_forward_hook(lambda *_: pytest.fail("the trunk ran"))
    batch = GroupBatch.from_groups(rows)
    values = module.values(batch)
    assert torch.equal(values, torch.zeros(len(batch.completion_ids)))
    assert not module.critic(batch, torch.zeros(len(values), WIDTH) if kind == "head" else None).requires_grad


def test_a_completion_without_tokens_among_others_has_no_value() -> None:
    module = built(TINY, COPY)
    nn.init.ones_(module.critic.head.weight)
    batch = GroupBatch.from_groups(
        [Group(prompt=[5, 6], completions=[[], [7, 8]]), Group(prompt=[9], completions=[[]])]
    )
    expected = by_hand(module.policy.model, torch.ones(WIDTH), batch)
    torch.testing.assert_close(module.values(batch), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_does_not_round_values(kind: str, reward_folder: Path) -> None:
    """The states may be in bf16; their product with the head must not be."""
    module = built(TINY, configs(reward_folder)[kind])
    nn.init.normal_(module.critic.head.weight, generator=torch.Generator().manual_seed(1))
    batch = GroupBatch.from_groups([Group(prompt=[1, 40], completions=[[50, 51, 52], [60, 3]])])
    engine = module.engine if kind == "head" else module.critic._engine
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        states = engine(batch, logps=False, hidden="before").hidden
        values = module.values(batch)
    assert values.dtype == torch.float32
    expected = states.double() @ module.critic.head.weight[0].double()
    assert torch.allclose(values.double(), expected, atol=1e-5, rtol=0)


def test_where_states_come_from_is_not_guessed() -> None:
    batch = GroupBatch.from_groups(groups(1, 1))
    with pytest.raises(AssertionError, match="shared trunk"):
        built(TINY, HEAD).critic(batch)
    with pytest.raises(AssertionError, match="shared trunk"):
        built(TINY, COPY).critic(batch, torch.zeros(len(batch.completion_ids), WIDTH))


# ------------------------------------------------------------------------------------------------------- reward models


def test_a_value_is_the_score_of_what_has_been_read(reward_folder: Path) -> None:
    """V before token t + 1 is the reward model's score of the text up to token t."""
    module = built(TINY, configs(reward_folder)["reward_model"])
    prompt, completion = [1, 40, 41, 42], [50, 51, 3, 52]
    batch = GroupBatch.from_groups([Group(prompt=prompt, completions=[[*completion, 60]])])
    reward = SequenceClassifier(str(reward_folder))
    prefixes = [completion[:n] for n in (1, 2, 3, 4)]
    scores = reward([""] * 4, [""] * 4, [prompt] * 4, prefixes)
    with torch.no_grad():
        values = module.values(batch)
    assert values[1:].tolist() == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_reward_model_becomes_the_critic(dtype: Any, tmp_path: Path) -> None:
    """The state after the last token is the one before a token that follows: its value is the trained score."""
    rewarding = RewardModel(policy=PolicyConfig(init_seed=3, dtype=dtype), optim=OPTIM)
    t = trainer(tmp_path, max_steps=2, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(rewarding, datamodule=FixedData(groups(8, 2)))
    t.save_checkpoint(tmp_path / "checkpoint")
    folder = export_reward(tmp_path / "checkpoint", tmp_path / "exported")
    module = built(PolicyConfig(dtype=dtype), CriticConfig(kind="reward_model", reward_model=str(folder)))
    assert module.critic.trunk.dtype == getattr(torch, dtype)
    assert module.critic.head.weight.dtype == torch.float32
    ids = [[50, 51, 3], [60, 61, 62, 3]]
    with torch.no_grad():
        scores = rewarding.rewards(GroupBatch.from_groups([Group(prompt=[1, 40], completions=ids)]))
        values = module.values(GroupBatch.from_groups([Group(prompt=[1, 40], completions=[[*c, 9] for c in ids])]))
    # The export keeps the head in the trunk's dtype: in bf16 each of its entries is off by up to 0.4%.
    torch.testing.assert_close(values[[3, 8]], scores, atol=1e-5 if dtype == "float32" else 0.05, rtol=0)


def test_a_reward_model_without_dropout_and_with_checkpointing(tmp_path: Path, tiny_tokenizer) -> None:
    """Dropout in its configuration stays off in training; recomputed activations give the same gradients."""
    classifier(tmp_path, tiny_tokenizer, attention_dropout=0.5)
    config = CriticConfig(kind="reward_model", reward_model=str(tmp_path))
    batch = GroupBatch.from_groups(groups(3, 2))
    found = []
    for checkpointing in (False, True):
        module = built(PolicyConfig(gradient_checkpointing=checkpointing), config)
        module.train()
        values = module.values(batch)
        values.sum().backward()
        found.append([values.detach(), *(p.grad for p in module.critic.parameters())])
        assert all(p.grad is not None for p in module.critic.parameters())
    for plain, again in zip(*found, strict=True):  # attention takes another way where it is recomputed
        torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(module.values(batch), found[0][0], atol=1e-5, rtol=1e-5)


def test_a_larger_vocabulary_of_the_reward_model_does_no_harm(tmp_path: Path, tiny_tokenizer) -> None:
    """Reward models often come with a padding token of their own, behind the policy's tokens."""
    own = PreTrainedTokenizerFast.from_pretrained(save(tiny_tokenizer, tmp_path / "tokenizer"))
    own.add_special_tokens({"pad_token": "[PAD]"})
    classifier(tmp_path / "model", own, vocab_size=VOCAB + 1)
    module = built(TINY, CriticConfig(kind="reward_model", reward_model=str(tmp_path / "model")))
    assert module.critic.trunk.embed_tokens.num_embeddings == VOCAB + 1


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "value_head"}, "critic.kind is one of head, copy, reward_model; got 'value_head'"),
        ({"kind": "reward_model"}, "needs critic.reward_model"),
        ({"kind": "reward_model", "reward_model": ""}, "needs critic.reward_model"),
        ({"kind": "copy", "reward_model": "rm"}, "goes with critic.kind=reward_model; got critic.kind=copy"),
    ],
)
def test_settings_that_make_no_critic(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CriticConfig(**settings)


def refused(folder: Path | str, message: str, policy: PolicyConfig = TINY) -> None:
    with pytest.raises(UserError, match=message) as caught:
        built(policy, CriticConfig(kind="reward_model", reward_model=str(folder)))
    assert "\n" not in str(caught.value)


def test_reward_models_that_cannot_be_critics(tmp_path: Path, tiny_tokenizer, tiny_model_dir: Path) -> None:
    refused(tmp_path / "nowhere", "no model folder")
    refused(tiny_model_dir, "is no sequence classifier: it lacks score.weight")
    classifier(tmp_path / "three", tiny_tokenizer, labels=3)
    refused(tmp_path / "three", "has 3 outputs and a value is one number")
    small = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(**small, num_hidden_layers=1, num_labels=1)).save_pretrained(
        tmp_path / "bert"
    )
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "BertForSequenceClassification, whose head is not one linear layer `score`")


def test_a_trunk_that_sees_later_tokens_is_refused(tmp_path: Path, tiny_tokenizer) -> None:
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_labels=1, use_bidirectional_attention=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Gemma3TextForSequenceClassification(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    refused(tmp_path, "cannot be a critic: .* lets a token see later ones")


def test_another_vocabulary_is_refused(tmp_path: Path, tiny_tokenizer) -> None:
    """The same size and the same ids, but two tokens in each other's place."""
    folder = tmp_path / "swapped"
    classifier(folder, tiny_tokenizer)
    file = folder / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"!": 4', '"!": 5').replace('"\\"": 5', '"\\"": 4'))
    assert file.read_text() != text
    refused(folder, r"another vocabulary than the policy: token 4, '!', is id 5 there")
    fewer = tmp_path / "fewer"
    classifier(fewer, tiny_tokenizer, vocab_size=VOCAB - 12)
    refused(fewer, "embeds 500 tokens and the policy's tokenizer has 512")


def test_a_head_that_would_lose_its_bias_is_refused(tmp_path: Path, tiny_tokenizer) -> None:
    """transformers' Llama classifier has no place for one and would drop it with a warning."""
    from safetensors.torch import load_file, save_file

    classifier(tmp_path, tiny_tokenizer)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"score.bias": torch.ones(1)}, file, metadata={"format": "pt"})
    refused(tmp_path, "has score.bias, for which LlamaForSequenceClassification of transformers has no place")
    with pytest.raises(UserError, match=r"has score\.bias"):
        SequenceClassifier(str(tmp_path))


def test_float16_is_not_trained(reward_folder: Path) -> None:
    lora = PolicyConfig(dtype="float16", lora=LoRAConfig(r=4))
    refused(reward_folder, "float16 cannot be trained: use policy.dtype bfloat16 or float32", lora)
