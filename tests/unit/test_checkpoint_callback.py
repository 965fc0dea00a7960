"""`callbacks.Checkpoint`: when it saves, what `last` points at, what a refused save leaves; plain ModelCheckpoint."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

import callbacks
from alignment.checkpoint import CheckpointError, SafeCheckpointIO, load_checkpoint_folder, resolve, verify
from alignment.checkpoint_folder import complete
from tests.loops import Recorder, fit


class Saves(L.Callback):
    """Notes global_step at each save."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)


def run(
    folder: Path, updates: int = 1, trainer: dict[str, Any] | None = None, **checkpoint: Any
) -> tuple[callbacks.Checkpoint, list[int]]:
    keep, saves = callbacks.Checkpoint(dirpath=folder / "checkpoints", **checkpoint), Saves()
    fit(folder, [saves, keep], module=Recorder(updates=updates), **{"limit_val_batches": 0, **(trainer or {})})
    return keep, saves.steps


def test_saves_at_each_multiple_and_at_the_end(tmp_path):
    keep, steps = run(tmp_path, every_n_train_steps=5)
    assert steps == [5, 10, 15, 18]
    assert resolve("last", tmp_path / "checkpoints").resolve().name == "epoch=3-step=18.ckpt"
    assert keep.best_model_path == str(tmp_path / "checkpoints" / "epoch=3-step=18.ckpt")


def test_saves_past_a_multiple_that_a_batch_jumped_over(tmp_path):
    # Four steps a batch: 4, 8, 12, ... cross 5, 10, 15, 20 at 8, 12, 16, 20; Lightning's own would save at 20 only.
    _, steps = run(tmp_path, updates=4, every_n_train_steps=5, trainer={"max_epochs": 1})
    assert steps == [8, 12, 16, 20, 24]


def test_saves_at_time_intervals(tmp_path):
    _, steps = run(tmp_path, train_time_interval=timedelta(0), trainer={"max_epochs": 1})
    assert steps == [1, 2, 3, 4, 5, 6]
    _, steps = run(tmp_path / "long", train_time_interval=timedelta(hours=1), trainer={"max_epochs": 1})
    assert steps == [6]


def test_saves_each_epoch_by_default(tmp_path):
    _, steps = run(tmp_path)
    assert steps == [6, 12, 18]
    _, steps = run(tmp_path / "val", trainer={"limit_val_batches": 1.0})
    assert steps == [6, 12, 18]


def test_is_silent(tmp_path, recwarn):
    run(tmp_path, every_n_train_steps=5)
    run(tmp_path, every_n_train_steps=5)
    assert not [w for w in recwarn if "heckpoint" in str(w.message) or "pre-optimization" in str(w.message)]


def test_a_save_with_a_validation_due_waits_for_its_metric(tmp_path):
    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=2, monitor="val", mode="max", save_top_k=2)
    module = Recorder()
    fit(tmp_path, [keep], module=module, max_epochs=1, val_check_interval=2)
    scores = {Path(p).name: float(s) for p, s in keep.best_k_models.items()}
    assert len(scores) == 2
    for path in keep.best_k_models:
        weight = load_checkpoint_folder(path)["state_dict"]["layer.weight"]
        assert float(weight.sum()) == pytest.approx(scores[Path(path).name])


def test_the_best_stay_and_last_is_newer(tmp_path):
    # The monitored value falls with every epoch in mode "max": the first checkpoint is the best one for good.
    class Falling(Recorder):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", -float(self.trainer.global_step), batch_size=1)

    keep = callbacks.Checkpoint(dirpath=tmp_path, monitor="val", mode="max")
    fit(tmp_path, [keep], module=Falling(), max_epochs=4)
    assert Path(keep.best_model_path).name == "epoch=0-step=6.ckpt"
    assert resolve("last", tmp_path).resolve().name == "resume-epoch=3-step=24.ckpt"
    assert resolve("best", tmp_path) == tmp_path / "epoch=0-step=6.ckpt"
    assert [p.name for p in complete(tmp_path)] == ["resume-epoch=3-step=24.ckpt", "epoch=0-step=6.ckpt"]


def test_top_k_state_goes_on_after_a_resume(tmp_path):
    def callback() -> callbacks.Checkpoint:
        return callbacks.Checkpoint(dirpath=tmp_path, monitor="val", mode="max", save_top_k=2)

    whole, first, second = callback(), callback(), callback()
    fit(tmp_path / "whole", [whole], module=Recorder(), max_epochs=4)
    expected = {Path(p).name: float(s) for p, s in whole.best_k_models.items()}
    for path in complete(tmp_path):
        SafeCheckpointIO().remove_checkpoint(path)
    fit(tmp_path, [first], module=Recorder(), max_epochs=2)
    fit(tmp_path, [second], tmp_path / "last.ckpt", module=Recorder(), max_epochs=4)
    assert {Path(p).name: float(s) for p, s in second.best_k_models.items()} == expected


def test_a_refused_save_leaves_the_records_and_the_pointer(tmp_path, monkeypatch, caplog):
    rename, seen = os.rename, []

    def refuse_second(source: Any, target: Any) -> None:
        if str(target).endswith("step=12.ckpt"):
            raise OSError(30, "Read-only file system")
        rename(source, target)

    class Look(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch:
                seen.append((Path(keep.best_model_path).name, verify(tmp_path / "last.ckpt")["step"]))

    monkeypatch.setattr(os, "rename", refuse_second)
    keep = callbacks.Checkpoint(dirpath=tmp_path)
    with caplog.at_level(logging.ERROR):
        fit(tmp_path, [Look(), keep], module=Recorder(), max_epochs=4, limit_val_batches=0)
    assert "Read-only file system" in caplog.text
    assert seen == [("epoch=0-step=6.ckpt", 6), ("epoch=0-step=6.ckpt", 6), ("epoch=2-step=18.ckpt", 18)]


def test_two_refused_saves_stop_the_run(tmp_path, monkeypatch):
    def refuse(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    keep = callbacks.Checkpoint(dirpath=tmp_path)
    with pytest.raises(CheckpointError, match=r"step=12.*No space left"):
        fit(tmp_path, [keep], module=Recorder(), max_epochs=4, limit_val_batches=0)


def test_evaluation_does_not_take_another_checkpoint(tmp_path):
    keep, io = callbacks.Checkpoint(dirpath=tmp_path), SafeCheckpointIO()
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[keep], plugins=[io], default_root_dir=tmp_path)
    keep.setup(trainer, Recorder(), "validate")
    assert io.fallback is False
    keep.setup(trainer, Recorder(), "fit")
    assert io.fallback is True


PLAIN = [{"save_last": True}, {"save_last": "link"}, {"save_top_k": -1}, {"every_n_train_steps": 2}]


@pytest.mark.parametrize("settings", PLAIN, ids=str)
def test_plain_model_checkpoint_works_with_the_folders(settings, tmp_path):
    keep = ModelCheckpoint(dirpath=tmp_path, **settings)
    whole, resumed = Recorder(), Recorder()
    fit(tmp_path, [keep], module=whole, limit_val_batches=0)
    paths = complete(tmp_path)
    assert len(paths) >= 2
    for path in paths:
        verify(path)
    start = sorted(paths, key=lambda p: verify(p)["step"])[0]
    fit(tmp_path, [ModelCheckpoint(dirpath=tmp_path, **settings)], start, module=resumed, limit_val_batches=0)
    assert resumed.end() == whole.end()
    if settings.get("save_last"):
        assert verify(tmp_path / "last.ckpt")["step"] == 18


def test_early_stopping_keeps_its_count_across_a_resume(tmp_path):
    def stopping() -> list[L.Callback]:
        return [EarlyStopping("val", mode="min", patience=2, min_delta=100.0), callbacks.Checkpoint(dirpath=tmp_path)]

    whole, first, second = Recorder(), Recorder(), Recorder()
    fit(tmp_path, [EarlyStopping("val", mode="min", patience=2, min_delta=100.0)], module=whole, max_epochs=9)
    fit(tmp_path, stopping(), module=first, max_epochs=2)
    fit(tmp_path, stopping(), tmp_path / "last.ckpt", module=second, max_epochs=9)
    assert whole.events[-1][0] == "epoch ends"
    assert second.events[-1] == whole.events[-1]
    assert second.end() == whole.end()


def test_a_misspelt_monitor_is_told_once(tmp_path):
    with pytest.warns(UserWarning, match=r"Checkpoint monitors 'vall', which nothing has logged so far.*val") as told:
        keep, _ = run(tmp_path, monitor="vall", trainer={"limit_val_batches": 1, "max_epochs": 3})
    assert sum("monitors 'vall'" in str(warning.message) for warning in told) == 1
    assert keep.best_model_path == ""
    assert keep.last_model_path


def test_weights_only(tmp_path):
    keep, _ = run(tmp_path, save_weights_only=True)
    state = load_checkpoint_folder(keep.best_model_path)
    assert "optimizer_states" not in state
    assert torch.is_tensor(state["state_dict"]["layer.weight"])
