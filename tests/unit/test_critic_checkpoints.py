"""Where the value loss goes, and a critic's life in the checkpoints and exports of its module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.export import export
from alignment.policy import PolicyConfig
from alignment.reward_export import is_reward_model
from tests.critics import COPY, HEAD, KINDS, LORA, UNTIED, Valued, built, classifier, configs
from tests.toys import TINY, FixedData, groups, trainer


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    classifier(folder, tiny_tokenizer)
    return folder


# ----------------------------------------------------------------------------------------------------------- gradients


def test_a_shared_trunk_feels_the_value_loss_unless_detached() -> None:
    """V = w . h: with w = 0 nothing flows back, with w != 0 it does; detached states keep it out."""
    module = built(TINY, HEAD)
    batch = GroupBatch.from_groups(groups(3, 2))
    nn.init.ones_(module.critic.head.weight)
    states = module.engine(batch, logps=False, hidden="before").hidden
    module.critic(batch, states.detach()).sum().backward()
    assert all(p.grad is None for p in module.policy.parameters())
    # dV/dw is the sum of the scored states.
    torch.testing.assert_close(module.critic.head.weight.grad[0], states[batch.scored].sum(0), atol=1e-4, rtol=1e-5)
    module.critic(batch, states).sum().backward()
    assert module.policy.model.embed_tokens.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["copy", "reward_model"])
@pytest.mark.parametrize("policy", [TINY, LORA], ids=["all weights", "LoRA"])
def test_a_trunk_of_its_own_leaves_the_policy_alone(kind: str, policy: PolicyConfig, reward_folder: Path) -> None:
    module = built(policy, configs(reward_folder)[kind])
    nn.init.ones_(module.critic.head.weight)
    module.values(GroupBatch.from_groups(groups(3, 2))).sum().backward()
    assert all(p.grad is None for p in module.policy.parameters())
    trained = {n for n, p in module.critic.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in module.critic.named_parameters() if p.requires_grad}
    adapters_only = kind == "copy" and policy is LORA
    assert all("lora_" in n or n == "head.weight" for n in trained) == adapters_only


# --------------------------------------------------------------------------------------------------------- checkpoints


def names(module: Valued) -> set[str]:
    return {n for n in module.state_dict() if not n.startswith("policy.")}


def test_names_in_a_checkpoint(reward_folder: Path) -> None:
    """Two layers of nine tensors, embedding and last norm; LoRA's two on seven linear layers; no LM head."""
    kinds = configs(reward_folder)
    assert names(built(TINY, kinds["head"])) == {"critic.head.weight"}
    for policy, kind, count in [(UNTIED, "copy", 20), (LORA, "copy", 28), (LORA, "reward_model", 20)]:
        found = names(built(policy, kinds[kind])) - {"critic.head.weight"}
        assert len(found) == count
        assert all(n.startswith("critic.trunk.") for n in found)
        assert not any("lm_head" in n for n in found)
    parameters = [n for n, _ in built(TINY, COPY).named_parameters()]
    assert sum(n.endswith("embed_tokens.weight") for n in parameters) == 2  # the policy's and the critic's, once each


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [TINY, LORA], ids=["all weights", "LoRA"])
def test_a_checkpoint_brings_back_the_critic_exactly(
    policy: PolicyConfig, kind: str, reward_folder: Path, tmp_path: Path
) -> None:
    config = configs(reward_folder)[kind]
    module = Valued(policy, config)
    # Three steps: a head of zeros passes no gradient on in the first, and LoRA's B of zeros none to A in the second.
    t = trainer(tmp_path, max_steps=3, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(16, 2)))
    t.save_checkpoint(tmp_path / "checkpoint")
    fresh = dict(built(policy, config).named_parameters())
    restored = Valued.load_from_checkpoint(tmp_path / "checkpoint")
    for name, value in module.named_parameters():
        assert torch.equal(value, dict(restored.named_parameters())[name]), name
        # everything that is trained was trained, and what is frozen was not
        assert torch.equal(value, fresh[name]) != value.requires_grad, name
    batch = GroupBatch.from_groups(groups(4, 2))
    with torch.no_grad():
        assert torch.equal(restored.values(batch), module.values(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(kind: str, reward_folder: Path, tmp_path: Path) -> None:
    config, data = configs(reward_folder)[kind], FixedData(groups(8, 2))  # one batch an epoch

    def fit(steps: int, folder: Path, ckpt_path: str | None = None) -> Valued:
        module = Valued(LORA, config)
        t = trainer(folder, max_steps=steps, max_epochs=-1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
        t.fit(module, datamodule=data, ckpt_path=ckpt_path)
        t.save_checkpoint(folder / "checkpoint")
        return module

    whole = fit(3, tmp_path / "whole")
    fit(1, tmp_path / "first")
    second = fit(3, tmp_path / "second", str(tmp_path / "first" / "checkpoint"))
    for (name, a), b in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_another_kind_of_critic_is_refused(reward_folder: Path, tmp_path: Path) -> None:
    module = Valued(LORA, COPY)
    t = trainer(tmp_path, max_steps=1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(8, 2)))
    t.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"has 28 weights this module does not, for example critic\.trunk"):
        Valued.load_from_checkpoint(tmp_path / "checkpoint", critic=HEAD)
    with pytest.raises(UserError, match=r"lacks 20 weights this module trains, for example critic\.trunk"):
        Valued.load_from_checkpoint(tmp_path / "checkpoint", critic=configs(reward_folder)["reward_model"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [TINY, LORA], ids=["all weights", "LoRA"])
def test_an_export_is_the_policy_alone(
    policy: PolicyConfig, kind: str, reward_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Valued(policy, configs(reward_folder)[kind])
    t = trainer(tmp_path, max_steps=1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(8, 2)))
    t.save_checkpoint(tmp_path / "checkpoint")
    assert not is_reward_model(tmp_path / "checkpoint")
    ids = torch.tensor([[1, 40, 41, 42, 3]])
    with torch.no_grad():
        expected = module.policy.eval()(ids).logits
    for source, out in ((tmp_path / "checkpoint", tmp_path / "a"), (module, tmp_path / "b")):
        model, report = AutoModelForCausalLM.from_pretrained(export(source, out), output_loading_info=True)
        assert not report["unexpected_keys"]
        assert not report["missing_keys"]
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(ids).logits, expected, atol=1e-5, rtol=0)
    assert "left out of the export, which holds the policy alone: critic." in caplog.text
    assert all(len(record.getMessage()) < 400 for record in caplog.records)
