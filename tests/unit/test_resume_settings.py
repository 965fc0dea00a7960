"""C23 for the optimizer: what is given anew on a resume is used, what is not comes from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.optim import OptimConfig
from modules import SFT
from tests.toys import TINY, FixedData, groups, trainer


class Watch(L.Callback):
    """The learning rate and the settings of both parameter groups at every optimizer step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.groups: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.groups = [{k: v for k, v in g.items() if k != "params"} for g in trainer.optimizers[0].param_groups]
        self.rates.append(self.groups[0]["lr"])


def run(optim: OptimConfig, folder: Path, max_steps: int, start: Path | None = None, batch_size: int = 4) -> Watch:
    """Train SFT from `start` up to `max_steps` and save in `folder`."""
    watch = Watch()
    settings: dict[str, Any] = {"limit_val_batches": 0, "plugins": [SafeCheckpointIO()], "callbacks": [watch]}
    t = trainer(folder, max_steps=max_steps, max_epochs=-1, **settings)
    data = FixedData(groups(32, 1), batch_size=batch_size)
    t.fit(SFT(policy=TINY, optim=optim), datamodule=data, ckpt_path=None if start is None else str(start))
    t.save_checkpoint(folder / "c")
    return watch


LINEAR = OptimConfig(lr=1e-3, schedule="linear", weight_decay=0.1)


def test_nothing_given_anew_changes_nothing(tmp_path: Path) -> None:
    first = run(LINEAR, tmp_path, max_steps=2)
    assert first.rates == [1e-3, 0.5e-3]
    again = run(LINEAR, tmp_path, max_steps=4, start=tmp_path / "c")
    # The schedule is that of four steps now: 1 - 2 / 4 and 1 - 3 / 4 of the peak.
    assert again.rates == pytest.approx([0.5e-3, 0.25e-3])
    assert [g["weight_decay"] for g in again.groups] == [0.1, 0.0]


def test_the_rate_and_everything_beside_it(tmp_path: Path) -> None:
    run(LINEAR, tmp_path, max_steps=2)
    anew = OptimConfig(lr=8e-3, schedule="linear", weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    watch = run(anew, tmp_path, max_steps=4, start=tmp_path / "c")
    assert watch.rates == pytest.approx([4e-3, 2e-3])
    assert [g["name"] for g in watch.groups] == ["matrices", "vectors"]
    assert [g["weight_decay"] for g in watch.groups] == [0.3, 0.0]
    assert all((g["betas"], g["eps"], g["initial_lr"]) == ((0.8, 0.9), 1e-6, 8e-3) for g in watch.groups)


def test_8_bit_and_sgd(tmp_path: Path) -> None:
    for kind in ("adamw_8bit", "sgd"):
        before = OptimConfig(lr=1e-3, schedule="constant", optimizer=kind)
        run(before, tmp_path / kind, max_steps=1)
        anew = OptimConfig(lr=2e-3, schedule="constant", optimizer=kind, betas=(0.5, 0.9))
        watch = run(anew, tmp_path / kind, max_steps=2, start=tmp_path / kind / "c")
        assert watch.rates == [2e-3]
        assert [g["momentum"] if kind == "sgd" else tuple(g["betas"]) for g in watch.groups] == [
            0.5 if kind == "sgd" else (0.5, 0.9)
        ] * 2


def test_another_batch_size_under_the_large_batch_rule(tmp_path: Path) -> None:
    """0.7 of the rate from batch 1,024 on, also when a resume brings that batch size."""
    optim = OptimConfig(lr=1e-3, schedule="constant", large_batch_rule=True)
    assert run(optim, tmp_path, max_steps=1, batch_size=32).rates == [1e-3]
    watch = run(optim, tmp_path, max_steps=2, start=tmp_path / "c", batch_size=1024)
    assert watch.rates == pytest.approx([0.7e-3])


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run(LINEAR, tmp_path, max_steps=1)
    with pytest.raises(UserError, match="optimizer is sgd, and the state in the checkpoint is that of adamw"):
        run(OptimConfig(optimizer="sgd"), tmp_path, max_steps=2, start=tmp_path / "c")
