"""Which checkpoints a module takes, and what it makes of settings that only a real run brings together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO, load_checkpoint_folder
from alignment.errors import UserError
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.training import STATE_KEY
from modules import DPO, SFT, RewardModel
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

LORA = PolicyConfig(lora=LoRAConfig(r=4))


class OwnDPO(DPO):
    """A user's variant."""


def saved(module: L.LightningModule, folder: Path) -> str:
    t = trainer(folder, max_steps=1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(4, 2)))
    t.save_checkpoint(folder / "c")
    return str(folder / "c")


def resume(module: L.LightningModule, path: str, folder: Path) -> L.Trainer:
    t = trainer(folder, max_steps=2, max_epochs=-1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(4, 2)), ckpt_path=path)
    return t


@pytest.mark.parametrize(
    ("first", "second"), [(SFT, DPO), (DPO, SFT), (RewardModel, SFT), (SFT, RewardModel), (DPO, RewardModel)]
)
@pytest.mark.parametrize("policy", [TINY, LORA], ids=["all weights", "LoRA"])
def test_a_checkpoint_of_another_module_is_refused(
    first: Any, second: Any, policy: PolicyConfig, tmp_path: Path
) -> None:
    """Its weights would fit in most of these pairs, and DPO would compare with the model from before the SFT."""
    path = saved(first(policy=policy, optim=OPTIM), tmp_path)
    message = rf"is of a {first.__name__}, not of a {second.__name__}; .*alignment export"
    with pytest.raises(UserError, match=message):
        resume(second(policy=policy, optim=OPTIM), path, tmp_path)
    with pytest.raises(UserError, match=message):
        second.load_from_checkpoint(path)


def test_a_variant_goes_on_from_its_base_class(tmp_path: Path) -> None:
    path = saved(DPO(policy=TINY, optim=OPTIM), tmp_path)
    assert resume(OwnDPO(policy=TINY, optim=OPTIM), path, tmp_path).global_step == 2


def test_weights_without_a_place_are_refused(tmp_path: Path) -> None:
    """LoRA on every layer, continued with LoRA on one kind of layer: 24 trained tensors would be dropped."""
    path = saved(SFT(policy=LORA, optim=OPTIM), tmp_path)
    fewer = replace(LORA, lora=LoRAConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="24 weights this module does not"):
        resume(SFT(policy=fewer, optim=OPTIM), path, tmp_path)
    with pytest.raises(UserError, match="24 weights this module does not"):
        SFT.load_from_checkpoint(path, policy=fewer)


@pytest.mark.parametrize("ensemble", ["heads", "copies"])
def test_mixed_precision_does_not_round_scores(ensemble: Any) -> None:
    """bf16 has 8 bits: 1 and 1 + 2^-9 are the same number. A head of zeros and two entries tells them apart."""
    module = RewardModel(policy=TINY, members=2, ensemble=ensemble)
    module.configure_model()
    batch = GroupBatch.from_groups(groups(3, 2))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        first = module.heads(batch)
        states = module.engine(batch, logps=False, hidden="at").hidden
    assert states is not None
    last = states[batch.completion_lengths.cumsum(0) - 1].double()
    assert first.dtype == torch.float32
    assert torch.allclose(first[:, 0].double(), last @ module.heads.weight[0].double(), atol=1e-6, rtol=0)


def test_a_reply_ends_where_the_template_ends_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """End of text is <bos> (1) here, end of turn <|im_end|> (3), and the model's own settings name 7."""
    module = SFT(policy=TINY)
    module.tokenizer.eos_token = "<bos>"
    module.configure_model()
    module.policy.generation_config.eos_token_id = [7]
    asked: dict[str, Any] = {}

    def generate(**settings: Any) -> torch.Tensor:
        asked.update(settings)
        replies = torch.tensor([[40, 3, 41, 42], [7, 50, 51, 52], [60, 61, 62, 63]])
        return torch.cat([settings["input_ids"], replies], dim=1)

    monkeypatch.setattr(module.policy, "generate", generate)
    batch = GroupBatch.from_groups([Group(prompt=[1, *[30] * n], completions=[[3]]) for n in (1, 2, 3)])
    assert module.complete(batch, 4) == [[40, 3], [7], [60, 61, 62, 63]]
    assert asked["eos_token_id"] == [1, 3, 7]


@pytest.mark.parametrize("part", ["factors", "additions"])
def test_the_state_of_another_version_is_refused_in_one_line(part: str, tmp_path: Path) -> None:
    """As it was before values had factors by cause: {configured, now}."""
    module = DPO(policy=TINY, optim=OPTIM)
    path = saved(module, tmp_path)
    checkpoint = load_checkpoint_folder(Path(path))
    del checkpoint[STATE_KEY]["moving"]["beta"][part]
    with pytest.raises(UserError, match=rf"training state in the checkpoint lacks '{part}': another version") as error:
        DPO(policy=TINY, optim=OPTIM).on_load_checkpoint(checkpoint)
    assert "\n" not in str(error.value)
