"""A policy with heads as an exported folder: what plain loaders see, and the fused policy from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.export import export
from alignment.export_command import main
from alignment.heads import preference
from alignment.heads_file import load_fused
from alignment.policy import LoRAConfig, PolicyConfig
from modules.decoupled_po import DecoupledPO
from tests.rl_toys import fit, here, odd, online
from tests.toys import groups

REWARDS: dict[str, Any] = {"odd": here(), "length": here(lambda completion: float(len(completion)))}
POLICIES = {"all weights": PolicyConfig(name="tiny"), "adapters": PolicyConfig(name="tiny", lora=LoRAConfig(r=4))}


def trained(folder: Path, policy: PolicyConfig, **settings: Any) -> tuple[DecoupledPO, Path]:
    """A module whose heads have moved a lot, and a checkpoint of it."""
    module = online(DecoupledPO, policy=policy, rewards={"odd": here(odd), "low": here(low)}, **settings)
    module.configure_model()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in module.heads.parameters():
            p.add_(torch.randn(p.shape, generator=draw))
    _, run = fit(module, folder / "run", max_steps=1, plugins=[SafeCheckpointIO()])
    run.save_checkpoint(folder / "a.ckpt")
    return module, folder / "a.ckpt"


def low(completion: str, completion_ids: list[int]) -> float:
    return sum(i < 130 for i in completion_ids) / max(1, len(completion_ids))


def said(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("policy", POLICIES)
def test_both_halves_together_are_the_policy(policy: str, tmp_path: Path) -> None:
    module, checkpoint = trained(tmp_path, POLICIES[policy])
    out = export(checkpoint, tmp_path / "out")
    model, heads = load_fused(out)
    ids = [1, *groups(1, 1)[0].completions[0]]
    expected = said(module.policy.eval(), ids)
    assert torch.allclose(said(model, ids), expected, atol=1e-5)
    with module.heads.detached():
        trunk = said(module.policy, ids)
    assert not torch.allclose(trunk, expected, atol=1e-2)
    assert torch.allclose(said(AutoModelForCausalLM.from_pretrained(out), ids), trunk, atol=1e-5)
    # the dial, in the module and in the folder
    for weights in ({"odd": 3.0}, {"odd": 0.0}):
        shares = preference(module.weights, weights)
        with module.heads.preferring(shares), heads.preferring(shares):
            assert torch.allclose(said(model, ids), said(module.policy, ids), atol=1e-5)
    assert load_fused(out, {"odd": 1.5})[1].preference == (0.75, 0.25)  # 1.5 beside the exported share of 0.5


def test_a_live_module_is_exported_alike(tmp_path: Path) -> None:
    module, checkpoint = trained(tmp_path, POLICIES["all weights"], fusion={"pool": "linear", "weights": {"odd": 3.0}})
    folders = [export(source, tmp_path / name) for source, name in ((module, "live"), (checkpoint, "saved"))]
    settings = [json.loads((out / "heads" / "config.json").read_text()) for out in folders]
    assert settings[0] == settings[1]
    assert settings[0]["weights"] == [0.75, 0.25]
    tensors = [load_file(out / "heads" / "heads.safetensors") for out in folders]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    model, _ = load_fused(folders[0])
    ids = [1, 5, 9, 200]
    with module.heads.preferring(module.dial):
        assert torch.allclose(said(model, ids), said(module.policy.eval(), ids), atol=1e-5)


def test_the_command_says_how_to_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, checkpoint = trained(tmp_path, POLICIES["all weights"])
    assert main([str(checkpoint), str(tmp_path / "out")]) == 0
    assert "load_fused(" in capsys.readouterr().out
    assert main([str(checkpoint), str(tmp_path / "out"), "--force"]) == 0


def test_the_dial_of_an_export(tmp_path: Path) -> None:
    """From a run's folder, whose last checkpoint it takes; shares 3 : 1, then 3 : 3 by name."""
    _, checkpoint = trained(tmp_path, POLICIES["all weights"])
    run = tmp_path / "a run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint.rename(run / "checkpoints" / "a.ckpt")
    assert main([str(run), str(tmp_path / "out"), "--weights", "{odd: 1.5}"]) == 0
    _, heads = load_fused(tmp_path / "out")
    assert heads.preference == (0.75, 0.25)
    heads.prefer({"low": 0.75})
    assert heads.preference == (0.5, 0.5)
    with pytest.raises(UserError, match="3 weights for 2 heads"):
        heads.prefer((1 / 3, 1 / 3, 1 / 3))
    for text, message in (("{tone: 1}", "a preference names tone"), ("[1]", "give a number for each name")):
        with pytest.raises(UserError, match=message):
            main([str(run), str(tmp_path / "new"), "--weights", text])


def test_folders_that_cannot_be_fused(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path, POLICIES["all weights"])
    out = export(checkpoint, tmp_path / "out")
    config = out / "heads" / "config.json"
    whole = config.read_text()
    for text, message in (("{}", "are described by"), ("{", "are damaged"), (whole.replace("24", "8"), "are damaged")):
        config.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            load_fused(out)
        assert "\n" not in str(caught.value)
    config.unlink()
    with pytest.raises(UserError, match="has no heads"):
        load_fused(out)
