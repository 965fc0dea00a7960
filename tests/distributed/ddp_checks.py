"""What `test_ddp.py` runs under one and under two processes. Run directly, it is one rank of a two-process group."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.metrics import Metrics, MetricWindow
from alignment.optim import OptimConfig
from alignment.update import Counts
from callbacks.predictions import Predictions
from modules import DPO, KTO, SFT, RewardModel
from tests.toys import TINY, FixedData, groups, trainer

OPTIM = OptimConfig(lr=1e-4, schedule="cosine", warmup_steps=3)
STEPS = 20
SETTINGS: dict[str, Any] = {"policy": TINY, "optim": OPTIM, "micro_batch_tokens": 40}
MODULES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "sft": (SFT, 1, {}),
    "reward": (RewardModel, 2, {}),
    "dpo": (DPO, 2, {"reference": "copy", "sft_weight": 0.3}),
    "whole batch": (DPO, 2, {"reference": "copy", "loss": {"aot": 1.0, "aot_unpaired": 1.0, "bco": 0.5, "sft": 0.1}}),
    "kto": (KTO, 2, {"good_weight": 1.5}),
}
"""Name -> class, completions of a group, settings."""
AWAY = ("whole batch", "kto")
"""Begun away from their reference: at it every order is a tie and every baseline 0."""


class Capture(L.Callback):
    """The first gradient and every step's metrics."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.logged: list[dict[str, float]] = []

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Any) -> None:
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


class OneBadRank(SFT):
    """The loss is NaN in batch 1, on rank 1 only (on the only rank when there is one)."""

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        share, metrics = super().loss(micro, counts)
        bad = self.batches_seen == 1 and distributed.rank() == distributed.world_size() - 1
        return share * float("nan") if bad else share, metrics


def rows(completions: int, count: int = 8 * (STEPS - 1) + 1) -> list[Group]:
    """The last batch holds one group, so with two ranks the second has none."""
    return labelled(groups(count, completions, margin=0.01))


def labelled(given: list[Group]) -> list[Group]:
    """Every third group has no good completion, in the others the first is one."""
    return [
        replace(g, rows={**g.rows, "label": [float(i == 0 and g.index % 3 > 0) for i in range(len(g.completions))]})
        for g in given
    ]


def move_reference(module: Any) -> None:
    """Away from the policy, to where the rows, which are random tokens, are less likely: the baseline is above 0."""
    module.configure_model()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in module.reference._model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=draw))


def ranks_trainer(folder: Path, world: int, **settings: Any) -> L.Trainer:
    strategy = "ddp" if world > 1 else "auto"
    return trainer(folder, devices=world, strategy=strategy, num_sanity_val_steps=0, **settings)


def equality(world: int, folder: Path) -> dict[str, Any]:
    """Train each module for 20 steps and validate it."""
    out: dict[str, Any] = {}
    for name, (build, completions, extra) in MODULES.items():
        module, capture = build(**SETTINGS, **extra), Capture()
        if name in AWAY:
            move_reference(module)
        held_out = labelled(groups(11, completions, seed=3, margin=0.01))
        data = FixedData(rows(completions), val=held_out, batch_size=8)
        untrained = ranks_trainer(folder, world).validate(module, datamodule=data, verbose=False)[0]
        t = ranks_trainer(folder, world, max_epochs=1, callbacks=[capture])
        t.fit(module, datamodule=data)
        assert capture.gradient is not None
        out[name] = {
            "gradient": capture.gradient.tolist(),
            "logged": capture.logged,
            "untrained": untrained,
            "val": {k: float(v) for k, v in t.callback_metrics.items() if k.startswith("val/")},
            "weights_equal": _same_on_all_ranks(module),
            "global_step": t.global_step,
            "memory": getattr(module, "loss_memory", {}),
        }
    return out


def _same_on_all_ranks(module: L.LightningModule) -> bool:
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    every = distributed.all_gather_objects(flat.numpy().tobytes())
    return all(other == every[0] for other in every)


def one_bad_rank(world: int, folder: Path) -> dict[str, Any]:
    """C18 on two ranks."""
    module = OneBadRank(**SETTINGS)
    t = ranks_trainer(folder, world, max_epochs=1)
    t.fit(module, datamodule=FixedData(rows(1, 32), batch_size=8))
    return {
        "nonfinite": module.nonfinite_steps,
        "global_step": t.global_step,
        "weights_equal": _same_on_all_ranks(module),
        "dumps": sorted(p.name for p in (folder / "nonfinite" / "batch-1").iterdir()),
    }


def metric_windows() -> dict[str, float]:
    """C20: 4 and 3 ones on two ranks, and a metric the second rank does not have."""
    window = MetricWindow()
    count = torch.tensor(4.0 - distributed.rank())
    window.update({"x": (count, count)})
    if distributed.rank() == 0:
        window.update({"only_here": (torch.tensor(6.0), torch.tensor(2.0))})
    return window.flush()


def predictions(world: int, folder: Path) -> list[str]:
    """Scores of 5 pairs in batches of 2."""
    t = ranks_trainer(folder, world, callbacks=[Predictions("scores.jsonl")])
    t.predict(RewardModel(**SETTINGS), datamodule=FixedData(groups(5, 2), batch_size=2), return_predictions=False)
    return (folder / "scores.jsonl").read_text().splitlines()


def run_all(world: int, folder: Path) -> None:
    results: dict[str, Any] = equality(world, folder)
    results["one_bad_rank"] = one_bad_rank(world, folder)
    results["metrics"] = metric_windows()
    results["predictions"] = predictions(world, folder)
    (folder / f"results.rank{distributed.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(2, Path(sys.argv[1]))
