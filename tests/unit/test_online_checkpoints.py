"""What checkpoints of GRPO and PPO hold, what load_from_checkpoint makes of them, and what an export leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from alignment.batches import GroupBatch
from alignment.checkpoint import CheckpointError, SafeCheckpointIO
from alignment.export import export
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.rewards import RewardSpec
from modules.grpo import GRPO
from modules.ppo import PPO
from tests.rl_toys import fit, here, odd, online, pretrained_adapter
from tests.toys import groups

LORA = PolicyConfig(name="tiny", lora=LoRAConfig(r=4))
SETTINGS: dict[str, Any] = {
    "completions": 3,
    "epochs": 2,
    "minibatches": 2,
    "sampling": {"max_tokens": 5, "temperature": 0.7, "stop_ids": [3, 9]},
    "rollout": {"eval_completions": 2, "eval_temperature": 0.5},
    "kl": {"coefficient": 0.1, "estimator": "k2"},
    "entropy": {"coefficient": 0.01},
    "mask_truncated": True,
    "dynamic_sampling": 0,
    "success": "odd",
    "micro_batch_tokens": 100,
}
OWN: dict[str, dict[str, Any]] = {
    "GRPO": {"advantage": "rloo", "advantage_args": {"scale": "batch"}, "loss": "gspo", "reduction": "token_mean"},
    "PPO": {"critic": {"kind": "copy"}, "gamma": 0.9, "lam": 0.8, "value_clip": None, "missing_eos_penalty": 0.5},
}


def saved(module: Any, folder: Path) -> Path:
    _, run = fit(module, folder, max_steps=1, plugins=[SafeCheckpointIO()])
    run.save_checkpoint(folder / "c")
    return folder / "c"


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_a_checkpoint_rebuilds_its_module(kind: Any, tmp_path: Path) -> None:
    """Every setting, those that the base classes take too; a function is found again by its import path."""
    short = RewardSpec(reward="Efficiency", weight=0.1, in_process=True)
    rewards = {"odd": here(odd, weight=2.0, scale=(0.0, 1.0)), "short": short}
    module = online(kind, rewards=rewards, **SETTINGS, **OWN[kind.__name__])
    path = saved(module, tmp_path)
    assert json.loads(json.dumps(dict(module.hparams))) == dict(module.hparams)
    again = kind.load_from_checkpoint(path)
    assert dict(again.hparams) == dict(module.hparams)
    assert again.suite.specs["odd"] == RewardSpec(
        reward="tests.rl_toys.odd", weight=2.0, scale=(0.0, 1.0), in_process=True
    )
    for name in ("completions", "epochs", "minibatches", "sampling", "rollout_config", "mask_truncated", "success"):
        assert getattr(again, name) == getattr(module, name), name
    assert (again.kl.config, again.entropy.config, again.batches_seen) == (module.kl.config, module.entropy.config, 1)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())
    other = kind.load_from_checkpoint(path, completions=5, kl={"coefficient": 0.3})
    assert (other.completions, other.kl.coefficient, other.epochs) == (5, 0.3, 2)


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_a_function_without_a_name_is_given_again(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lambda, or an object, cannot be written down: the checkpoint is one all the same, and says what it lacks."""

    class Always:
        def __call__(self, completions: list[str]) -> list[float]:
            return [1.0] * len(completions)

    for reward in (lambda completions: [1.0] * len(completions), Always()):
        path = saved(online(kind, rewards={"same": here(reward)}), tmp_path)
        with pytest.raises(CheckpointError, match=f"holds no rewards for {kind.__name__}; give it as well"):
            kind.load_from_checkpoint(path)
        assert kind.load_from_checkpoint(path, rewards={"same": here(reward)}).batches_seen == 1
        export(path, tmp_path / "out", force=True)
    assert "checkpoints lack 'rewards': a callable in it has no import path" in caplog.text


@pytest.mark.parametrize("kind", [GRPO, PPO])
@pytest.mark.parametrize("policy", ["whole", "lora", "pretrained"])
def test_an_export_is_the_policy_alone(
    kind: Any, policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without critic and reference, merged, from the checkpoint and from the live module: the same log-probs."""
    adapter = {"pretrained": lambda: str(pretrained_adapter(LORA, tmp_path / "adapter"))}.get(policy, lambda: None)()
    lora = None if policy == "whole" else LoRAConfig(r=4, pretrained=adapter)
    kl = {"coefficient": 0.1, "estimator": "k3"}
    module = online(kind, policy=PolicyConfig(lora=lora), kl=kl)
    path = saved(module, tmp_path)
    batch = GroupBatch.from_groups(groups(2, 2))
    expected = module.engine(batch).logps.detach()
    for source in (path, module):
        out = export(source, tmp_path / "out", force=True)
        model = AutoModelForCausalLM.from_pretrained(out)
        found = module.build_engine(model)(batch).logps.detach()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    names = set(module.state_dict())
    assert not any("reference" in name for name in names)
    assert ("critic.head.weight" in names) == (kind is PPO)
    if kind is PPO:
        assert "left out of the export, which holds the policy alone: critic.head.weight" in caplog.text
    if lora is not None:
        assert all("lora_" in name or name.startswith("critic.") for name in names)
