"""An exported reward model scores in transformers as it did here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.export_command import main
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.reward_export import export_reward
from modules import SFT, RewardModel
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

LORA = PolicyConfig(name="tiny", lora=LoRAConfig(r=4))


def trained(module: Any, folder: Path, completions: int = 2) -> Path:
    t = trainer(folder, max_steps=2, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(16, completions)))
    t.save_checkpoint(folder / "checkpoint")
    return folder / "checkpoint"


@pytest.mark.parametrize(
    ("policy", "settings", "labels"),
    [(TINY, {}, 1), (LORA, {"members": 3}, 1), (TINY, {"members": 2, "aggregation": "min"}, 2)],
)
def test_scores_survive_the_export(policy: PolicyConfig, settings: dict[str, Any], labels: int, tmp_path: Path) -> None:
    module = RewardModel(policy=policy, optim=OPTIM, **settings)
    checkpoint = trained(module, tmp_path)
    main([str(checkpoint), str(tmp_path / "out")])
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert classifier.config.num_labels == labels
    batch = GroupBatch.from_groups(groups(4, 2))
    rows = batch.padded(pad_id=classifier.config.pad_token_id)  # all rows in one padded batch
    with torch.no_grad():
        expected = module.rewards(batch)
        logits = classifier(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits
    scores = logits[:, 0] if labels == 1 else logits.min(dim=1).values
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    policy_only = trained(SFT(policy=TINY, optim=OPTIM), tmp_path / "sft", completions=1)
    with pytest.raises(UserError, match="no reward heads"):
        export_reward(policy_only, tmp_path / "out")
    copies = trained(RewardModel(policy=TINY, members=2, ensemble="copies", optim=OPTIM), tmp_path / "copies")
    with pytest.raises(UserError, match="own trunks"):
        export_reward(copies, tmp_path / "out")
    with pytest.raises(UserError, match="is not empty"):
        export_reward(copies, tmp_path)
