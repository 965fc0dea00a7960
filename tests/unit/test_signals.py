"""`callbacks.Signals`: a flag and a boundary, exit codes, handlers given back, SLURM, and an order that never comes."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

import callbacks
from alignment.checkpoint import SafeCheckpointIO, resolve, verify
from alignment.checkpoint_folder import complete
from tests.loops import Recorder, Rows, fit, loaders


class Send(L.Callback):
    """Sends signals to this process at a batch, a validation batch, or inside a save."""

    def __init__(self, *numbers: int, batch: int = -1, at: str = "") -> None:
        self.numbers, self.batch, self.at = numbers, batch, at

    def _send(self) -> None:
        for number in self.numbers:
            os.kill(os.getpid(), number)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.batch:
            self._send()

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if self.at == ("sanity" if trainer.sanity_checking else "validation"):
            self._send()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.at == "last epoch's end" and trainer.current_epoch == trainer.max_epochs - 1:
            self._send()

    def on_save_checkpoint(self, *args: Any) -> None:
        if self.at == "save":
            self._send()


def leave(folder: Path, *others: L.Callback, **trainer: Any) -> tuple[int, Recorder]:
    module = Recorder()
    with pytest.raises(SystemExit) as stop:
        fit(folder, [*others, callbacks.Signals()], module=module, **trainer)
    assert isinstance(stop.value.code, int)
    return stop.value.code, module


@pytest.fixture(autouse=True)
def _handlers_are_given_back() -> Any:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(n) for n in numbers]
    yield
    assert [signal.getsignal(n) for n in numbers] == before
    # One left behind would send its signal to whatever runs by then; one cancelled takes a moment to end.
    timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    for timer in timers:
        timer.join(timeout=2)
    assert not [timer for timer in timers if timer.is_alive()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_the_step_is_finished_and_saved(number, code, tmp_path):
    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=1000)
    got, module = leave(tmp_path, keep, Send(number, batch=3))
    assert got == code
    assert [e[2] for e in module.events if e[0] == "batch"] == [1, 2, 3, 4]
    assert verify(resolve("last", tmp_path))["step"] == 4
    whole, resumed = Recorder(), Recorder()
    fit(tmp_path, [], module=whole)
    fit(tmp_path, [], tmp_path / "last.ckpt", module=resumed)
    assert resumed.end() == whole.end()
    assert module.events + resumed.events == whole.events


def test_more_signals_change_nothing(tmp_path):
    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=1000)
    save = Send(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, at="save")
    code, _ = leave(tmp_path, keep, Send(signal.SIGINT, signal.SIGTERM, batch=2), save)
    assert code == 130  # the first one counts
    assert verify(resolve("last", tmp_path))["step"] == 3


def test_a_signal_inside_an_ordinary_save_lets_it_finish(tmp_path):
    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=2)
    code, _ = leave(tmp_path, keep, Send(signal.SIGTERM, at="save"))
    assert code == 143
    steps = [verify(p)["step"] for p in complete(tmp_path)]
    assert steps == [3, 2]


def test_during_a_validation_it_leaves_and_the_validation_is_done_again(tmp_path):
    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=1000)
    code, module = leave(tmp_path, keep, Send(signal.SIGTERM, at="validation"))
    assert code == 143
    assert [e[0] for e in module.events].count("validation") == 1
    whole, resumed = Recorder(), Recorder()
    fit(tmp_path, [], module=whole)
    fit(tmp_path, [], tmp_path / "last.ckpt", module=resumed)
    assert module.events[:-1] + resumed.events == whole.events


def test_during_the_sanity_check_nothing_is_saved(tmp_path):
    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=1000)
    code, module = leave(tmp_path, keep, Send(signal.SIGTERM, at="sanity"))
    assert code == 143
    assert module.events == []
    assert complete(tmp_path) == []


def test_the_last_batch_is_logged_before_leaving(tmp_path):
    rows = Rows()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=rows, log_every_n_steps=1, limit_val_batches=0, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path, plugins=[SafeCheckpointIO()],
        callbacks=[Send(signal.SIGTERM, batch=3), callbacks.Signals()],
    )  # fmt: skip
    with pytest.raises(SystemExit):
        trainer.fit(Recorder(), *loaders())
    assert [step for step, row in rows.rows if "loss" in dict(row)] == [0, 1, 2, 3]


def test_a_signal_after_the_last_batch_is_honoured_at_the_end(tmp_path):
    """No batch is under way by then, so none has metrics to be written."""
    got, module = leave(tmp_path, callbacks.Checkpoint(dirpath=tmp_path), Send(signal.SIGTERM, at="last epoch's end"))
    assert got == 143
    steps = [e[2] for e in module.events if e[0] == "batch"]
    assert verify(resolve("last", tmp_path))["step"] == steps[-1] == len(steps)


@pytest.mark.parametrize("keep", [[], [ModelCheckpoint(save_last=True)]], ids=["none", "plain"])
def test_without_our_checkpoint_callback_it_saves_all_the_same(keep, tmp_path):
    leave(tmp_path, *keep, Send(signal.SIGTERM, batch=3))
    assert [verify(path)["step"] for path in tmp_path.rglob("last.ckpt")] == [4]


def test_a_boundary_that_does_not_come_in_time_is_not_waited_for(tmp_path):
    class Stuck(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(200):
                    time.sleep(0.05)

    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=2)
    start = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        fit(tmp_path, [keep, callbacks.Signals(deadline=0.2)], module=Stuck())
    assert stop.value.code == 143
    assert time.monotonic() - start < 8
    assert verify(resolve("last", tmp_path))["step"] == 2


def test_handlers_are_replaced_only_while_fitting(tmp_path):
    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    mine = callbacks.Signals()
    fit(tmp_path, [Look(), mine], module=Recorder(), max_epochs=1)
    assert seen
    assert all(handler == mine._note for handler in seen)


def test_under_slurm_it_saves_for_the_automatic_resume_and_requeues(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for name, value in {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    plugins = [SafeCheckpointIO(), SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]
    code, _ = leave(tmp_path, Send(signal.SIGUSR1, batch=3), plugins=plugins)
    assert code == 143
    assert calls.read_text() == "requeue 77\n"
    assert verify(tmp_path / "hpc_ckpt_1.ckpt")["step"] == 4
    whole, resumed = Recorder(), Recorder()
    fit(tmp_path, [], module=resumed, plugins=plugins)  # the same command again, no ckpt_path
    fit(tmp_path / "elsewhere", [], module=whole)
    assert resumed.end() == whole.end()
    assert [e for e in resumed.events if e[0] == "batch"] == [e for e in whole.events if e[0] == "batch"][4:]
