"""What a module asks and does when it is told to leave in the middle of a batch; see also integration/test_stopping."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

import callbacks
from alignment import distributed
from alignment.checkpoint_folder import complete
from alignment.rewards import RewardSuite, Samples
from alignment.rollout import RolloutStopped
from alignment.stopping import droppable, stop_requested, together
from tests.loops import Eager, Recorder, fit


class Stopping(Recorder):
    """Calls `stop` inside its third batch."""

    def __init__(self, stop: Callable[[Stopping], None]) -> None:
        super().__init__()
        self.stop = stop

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with droppable(self):
            if batch_idx == 2:
                self.stop(self)
        super().training_step(batch, batch_idx)


def stop(module: L.LightningModule) -> None:
    raise RolloutStopped("a reason of one's own")


def stop_by_signal(module: L.LightningModule) -> None:
    assert not stop_requested(module)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop_requested(module)
    stop(module)


def test_without_a_trainer_nobody_asks() -> None:
    assert not stop_requested(Recorder())


@pytest.mark.parametrize("others", [[], [callbacks.Signals()]], ids=["no Signals", "no signal"])
def test_with_nothing_to_leave_for_the_exception_goes_on(others: list[L.Callback], tmp_path: Path) -> None:
    with pytest.raises(RolloutStopped, match="a reason of one's own"):
        fit(tmp_path, others, module=Stopping(stop))
    assert complete(tmp_path) == []


def test_signals_are_asked_for_only_while_fitting(tmp_path: Path) -> None:
    mine, module = callbacks.Signals(), Stopping(stop_by_signal)
    with pytest.raises(SystemExit):
        fit(tmp_path, [mine, callbacks.Checkpoint(dirpath=tmp_path)], module=module)
    assert not mine.stop_requested()


def test_a_loader_that_cannot_go_back_leaves_on_the_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = callbacks.Checkpoint(dirpath=tmp_path, every_n_train_steps=1)
    with pytest.raises(SystemExit) as left, caplog.at_level(logging.WARNING):
        fit(tmp_path, [keep, callbacks.Signals()], module=Stopping(stop_by_signal), train=Eager())
    assert left.value.code == 143
    assert "cannot go back by a batch" in caplog.text
    whole, resumed = Recorder(), Recorder()
    fit(tmp_path, [], module=whole, train=Eager())
    fit(tmp_path, [], tmp_path / "last.ckpt", module=resumed, train=Eager())
    assert resumed.end() == whole.end()


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    module = Stopping(stop_by_signal)
    with pytest.raises(SystemExit) as left:
        fit(tmp_path, [callbacks.Signals()], module=module, fast_dev_run=4)
    assert left.value.code == 143
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_has_changed_the_weights_cannot_be_dropped(tmp_path: Path) -> None:
    class Late(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            with droppable(self):
                stop_by_signal(self)

    with pytest.raises(AssertionError, match="before its first update only"):
        fit(tmp_path, [callbacks.Signals()], module=Late())


# ---------------------------------------------------------------------- rewards


def patient(completions: list[str]) -> list[float]:
    time.sleep(60)
    return [0.0] * len(completions)


def test_the_wait_for_rewards_can_be_left(tmp_path: Path) -> None:
    asked: list[float] = []

    def should_stop() -> bool:
        asked.append(time.monotonic())
        return len(asked) == 3

    with RewardSuite({"patient": patient}) as suite:
        suite.start()
        pending = suite.submit_samples(Samples(prompts=["p"], completions=["c"]))
        start = time.monotonic()
        with pytest.raises(RolloutStopped, match="while rewards were computed"):
            pending.wait(should_stop)
        assert time.monotonic() - start < 30


def test_after_the_wait_rewards_are_only_collected() -> None:
    calls: list[int] = []

    def counted(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return [float(len(text)) for text in completions]

    with RewardSuite({"here": {"reward": counted, "in_process": True}}) as suite:
        pending = suite.submit_samples(Samples(prompts=["p", "p"], completions=["a", "abc"]))
        with pytest.raises(RolloutStopped):
            suite.submit_samples(Samples(prompts=["p"], completions=["a"])).wait(lambda: True)
        assert calls == []
        pending.wait(lambda: False)
        pending.wait(lambda: True)  # nothing is left to wait for
        assert pending.collect().values.tolist() == [[1.0], [3.0]]
        assert calls == [2]


# ---------------------------------------------------------------------- two processes


def roll(module: L.LightningModule, stops: bool) -> None:
    with together(module):
        if stops:
            stop(module)


def one_of_two(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    module = Recorder()
    assert not distributed.has_note("x")
    dist.barrier()
    if rank == 0:
        distributed.leave_note("x")
    else:  # no collective: rank 0 may do what it wants meanwhile
        deadline = time.monotonic() + 120
        while not distributed.has_note("x"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert distributed.has_note("x")
    dist.barrier()
    if rank == 0:
        distributed.remove_note("x")
        distributed.remove_note("never left")
    dist.barrier()
    assert not distributed.has_note("x")
    roll(module, stops=False)
    with pytest.raises(RolloutStopped, match="this batch is dropped"):
        roll(module, stops=rank == 0)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_tell_each_other_and_stop_together(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=one_of_two, args=(rank, tmp_path)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout=300)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()


def test_alone_there_is_nobody_to_tell() -> None:
    distributed.leave_note("x")
    assert not distributed.has_note("x")
    distributed.remove_note("x")
