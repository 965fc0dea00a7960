"""C21 for online modules: from every batch and epoch's end, a resumed run is bit for bit the one that went on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint

from alignment.checkpoint import SafeCheckpointIO
from alignment.codec import Encoder
from alignment.optim import OptimConfig
from callbacks import FocusReward, FusionStability, GradientNormRatio, OnlineHeadUpdate, RegressionGuard, StalledHead
from datamodules import PromptData
from modules.decoupled_po import DecoupledPO
from modules.gdpo import GDPO
from modules.grpo import GRPO
from modules.morl import MORL
from modules.online_dpo import OnlineDPO
from modules.ppo import PPO
from tests.loops import Rows
from tests.rl_toys import here, odd_in_some, online
from tests.toys import trainer

WATCHED = "decoupled, watched"
RUNS: dict[str, tuple[type, dict[str, Any]]] = {
    "grpo": (GRPO, {}),
    "grpo, several updates, KL in the reward, refills": (
        GRPO,
        {
            "epochs": 2,
            "minibatches": 2,
            "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward", "target": 0.05, "horizon": 50, "ema": 0.5},
            "entropy": {"target": 6.0, "coefficient": 0.01, "keep": 0.5},
            "dynamic_sampling": 2,
            "reference_sync": {"alpha": 0.6, "every": 3},
        },
    ),
    "online dpo, a reference that follows": (
        OnlineDPO,
        {"minibatches": 2, "dynamic_sampling": 1, "reference_sync": {"alpha": 0.3, "every": 1}},
    ),
    "ppo": (
        PPO,
        {
            "epochs": 2,
            "minibatches": 2,
            "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward", "target": 0.05, "horizon": 50},
            "critic": {"kind": "copy"},
            "success": "length",
            "reference_sync": {"alpha": 0.1, "every": 1},
        },
    ),
    "gdpo, over tokens": (
        GDPO,
        {
            "whiten": "token",
            "minibatches": 2,
            "kl": {"coefficient": 0.1, "target": 0.05, "horizon": 50},
            "dynamic_sampling": 1,
            "reference_sync": {"alpha": 1.0, "every": 5},
        },
    ),
    "morl, gradients with a memory and a drawn order": (
        MORL,
        {"combine": "gradvac", "epochs": 2, "preferences": {}, "dynamic_sampling": 1},
    ),
    "morl, ideal point and critic": (
        MORL,
        {
            "scalarise": "smooth_chebyshev",
            "critic": {"kind": "head"},
            "kl": {"coefficient": 0.1, "target": 0.05, "horizon": 50},
            "reference_sync": {"every": 2},
        },
    ),
    "decoupled, conflicts cut": (
        DecoupledPO,
        {
            "minibatches": 2,
            "kl": {"coefficient": 0.1, "target": 0.05, "horizon": 50},
            "isolation": {"mode": "gradvac", "ratio": {"odd": 2.0}},
            "dynamic_sampling": 1,
            "reference_sync": {"alpha": 0.5, "every": 1},
        },
    ),
    "decoupled, cold start": (DecoupledPO, {"cold_start": {"rollouts": 1}, "epochs": 2, "kl_limit": 50.0}),
    "decoupled, only decoding fuses": (DecoupledPO, {"fusion": {"mode": "decode_only"}, "heads": {"every": 2}}),
    WATCHED: (DecoupledPO, {"isolation": {"mode": "project", "level": "states"}}),
}


EVENTS = {
    "gradient_control",
    "gradient_ratio",
    "stalled_head",
    "fusion_stability",
    "focus_reward",
    "focus_reward_end",
    "regression_guard",
    "online_head_update",
}


def length(completion: str, completion_ids: list[int]) -> float:
    return float(len(completion_ids))


class Feedback(OnlineHeadUpdate):
    """Under a fast clock, by which a batch takes a minute: a row arrives every 90 s, each second minute is a round of
    what has arrived. What the file holds depends on the time alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__("length", str(folder / "feedback.jsonl"), every=120.0, wait=False)
        self.clock = self.now

    def now(self) -> float:
        time = 60.0 * self._trainer.lightning_module.batches_seen
        rows = [{"prompt": f"Feedback {n}?", "alive": True} for n in range(1 + int(time // 90))]
        Path(self.path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return time


def watchers(folder: Path) -> list[L.Callback]:
    """Everything that watches several rewards, so touchy that each of them acts."""
    guard = RegressionGuard(evaluations=2)
    guard.best = 1e6  # it has seen better days
    return [
        GradientNormRatio({"odd": 3.0}, control=True),
        GradientNormRatio({"odd": 3.0}, of="heads", control=True),
        StalledHead(steps=1, threshold=1e3),
        FusionStability(limit=1e-9, cooldown=1),
        FocusReward(evaluations=1, steps=1, share=1.0),
        guard,
        Feedback(folder),
    ]


class SaveAlways(Checkpoint):
    """After every batch, and at every epoch's end, with the number of rows that its state counts as logged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, {}

    def _save(self, trainer: L.Trainer, place: str, due: bool) -> None:
        name = f"{place} {len(self.saved)}"
        # The row of this place itself is written after its hooks.
        self.saved[name] = len(trainer.logger.rows) + due
        trainer.save_checkpoint(self.folder / name)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "batch", (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "epoch", trainer.fit_loop.total_batch_idx % trainer.log_every_n_steps == 0)


def run(name: str, folder: Path, callbacks: list[Any], start: Path | None = None) -> tuple[list[Any], Any]:
    """Two epochs of three batches of four prompts, graded anew after each. Returns what was logged, and the end."""
    kind, settings = RUNS[name]
    file = folder / "prompts.jsonl"
    rows = [{"prompt": f"Question {i}?", "alive": i % 3 > 0} for i in range(14)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    strata = {"by": "measured", "regrade_every": 1, "rollouts": 4, "rates": [0.55, 0.45], "margin": 0.02}
    data = PromptData(str(file), cache_dir=None, val_fraction=0.15, batch_size=4, strata=strata, seed=3)
    module = online(
        kind,
        rewards={"odd": here(odd_in_some), "length": here(length, scale="running", weight=0.5)},
        optim=OptimConfig(lr=1e-3, warmup_steps=2),
        **settings,
    )
    logger, watching = Rows(), watchers(folder) if name == WATCHED else []
    loop = trainer(
        folder,
        max_epochs=2,
        logger=logger,
        callbacks=[*watching, *callbacks],
        enable_checkpointing=bool(callbacks),
        val_check_interval=1 if watching else None,
        log_every_n_steps=2,
        plugins=[SafeCheckpointIO()],
    )
    loop.fit(module, datamodule=data, ckpt_path=None if start is None else str(start))
    encoder = Encoder()
    state = {
        "weights": module.state_dict(),
        "optimizer": loop.optimizers[0].state_dict(),
        "schedule": loop.lr_scheduler_configs[0].scheduler.state_dict(),
        "module": module.training_state(),
        "data": data.state_dict(),
        "step": loop.global_step,
        "callbacks": [callback.state_dict() for callback in watching],
    }
    tree = encoder.encode(state)
    return logger.rows, (tree, encoder.tensors)


@pytest.mark.parametrize("name", RUNS)
def test_resumed_is_uninterrupted(name: str, tmp_path: Path) -> None:
    save = SaveAlways(tmp_path)
    rows, (tree, tensors) = run(name, tmp_path, [save])
    state = tree["module"]
    assert state["batches_seen"] == 6
    assert state["rewards"]["ranges"]["length"]
    assert tree["data"]["grades"]["version"] > 0
    if RUNS[name][0] is MORL:
        (method,) = state["several"].values()
        assert method.get("ideal", method.get("memory")) not in (None, [[0.0, 0.0], [0.0, 0.0]])
    if name == WATCHED:
        assert {key.removeprefix("event/") for _, row in rows for key, _ in row if key.startswith("event/")} == EVENTS
    if "reference_sync" in RUNS[name][1]:
        assert any(key.startswith("reference.") for key in tree["weights"])
    if "kl" in RUNS[name][1]:
        assert state["penalties"]["now"]["kl"]["coefficient"] != 0.1
    for place in ("batch 0", "batch 2", "epoch 3", "batch 5"):
        again, (other, values) = run(name, tmp_path, [], tmp_path / place)
        assert again == rows[save.saved[place] :], place
        assert other == tree, place
        assert list(values) == list(tensors)
        assert [key for key in tensors if not torch.equal(tensors[key], values[key])] == [], place
