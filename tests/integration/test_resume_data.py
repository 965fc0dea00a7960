"""C21 with what a user runs: the data modules, a falling schedule, cached references, logged values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from alignment.checkpoint import SafeCheckpointIO
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from datamodules import PreferenceData, SupervisedData
from modules import DPO, SFT, RewardModel
from tests.toys import TINY, trainer

OPTIM = OptimConfig(lr=2e-3, warmup_steps=3)  # cosine: it asks for trainer.estimated_stepping_batches
STEPS_PER_EPOCH = 5
LOG_EVERY = 3  # every place cuts a logging window
PLACES = (2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 3)  # inside the first epoch, exactly at its end, inside the second


class Watch(L.Callback):
    """Row numbers of every batch, what was logged after it; a checkpoint after the batches asked for."""

    def __init__(self, save_in: Path | None = None) -> None:
        self.save_in = save_in
        self.rows: list[tuple[list[int], dict[str, float]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        due = (trainer.fit_loop.total_batch_idx + 1) % LOG_EVERY == 0
        logged = {k: float(v) for k, v in trainer.callback_metrics.items() if due and not k.startswith("val/")}
        self.rows.append((batch.group_index.tolist(), logged))
        if self.save_in is not None and trainer.global_step in PLACES:
            trainer.save_checkpoint(self.save_in / str(trainer.global_step))


def pretrained(folder: Path) -> PolicyConfig:
    """An adapter that already does something, to be trained on."""
    policy = load_policy(PolicyConfig(name="tiny", lora=LoRAConfig(r=4)))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    policy.save_pretrained(str(folder))
    return PolicyConfig(name="tiny", lora=LoRAConfig(pretrained=str(folder)))


BUILD: dict[str, Callable[[Path], L.LightningModule]] = {
    "sft": lambda _: SFT(policy=TINY, optim=OPTIM),
    "reward_model": lambda _: RewardModel(policy=TINY, members=2, ensemble="copies", optim=OPTIM),
    "dpo cached": lambda _: DPO(policy=TINY, reference="cached", optim=OPTIM),
    "dpo frozen_adapter": lambda folder: DPO(policy=pretrained(folder / "adapter"), optim=OPTIM),
}


def fit(name: str, folder: Path, watch: Watch, start: Path | None = None) -> tuple[L.LightningModule, Any]:
    """Two epochs, or what is left of them. Returns the module and the optimizer's state."""
    kind = SupervisedData if name == "sft" else PreferenceData
    data = kind(
        "world:support",
        batch_size=4,
        max_rows=4 * STEPS_PER_EPOCH,
        max_eval_rows=4,
        length_aware=True,
        cache_dir=str(folder / "data"),
    )
    module = BUILD[name](folder)
    settings = {"plugins": [SafeCheckpointIO()], "callbacks": [watch], "use_distributed_sampler": True}
    t = trainer(folder, max_epochs=2, log_every_n_steps=LOG_EVERY, **settings)
    t.fit(module, datamodule=data, ckpt_path=None if start is None else str(start))
    assert t.global_step == 2 * STEPS_PER_EPOCH
    return module, t.optimizers[0].state_dict()


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, value in items for k, v in flat(value, f"{name}/{key}").items()}
    return {name: state}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", BUILD)
def test_resumed_is_uninterrupted(name: str, tmp_path: Path) -> None:
    whole = Watch(save_in=tmp_path)
    module, optimizer = fit(name, tmp_path, whole)
    assert module.lr_schedulers().get_last_lr()[0] < 0.2 * OPTIM.lr  # the schedule knew where the run ends
    for place in PLACES:
        # A reference that has to be computed anew is that of the start, not of the policy in the checkpoint.
        shutil.rmtree(tmp_path / ".cache", ignore_errors=True)
        rest = Watch()
        again, state = fit(name, tmp_path, rest, start=tmp_path / str(place))
        assert rest.rows == whole.rows[place:], place
        for ours, theirs in ((again.state_dict(), module.state_dict()), (flat(state), flat(optimizer))):
            assert ours.keys() == theirs.keys()
            assert [key for key, value in theirs.items() if not same(ours[key], value)] == [], place
