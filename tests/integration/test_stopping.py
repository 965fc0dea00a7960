"""R14: a signal while completions are sampled drops the batch; whoever resumes begins with it, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import callbacks
from alignment.checkpoint import load_checkpoint_folder, resolve
from alignment.rollout import RolloutStopped
from alignment.stopping import droppable, stop_requested, together
from benchmarks import trials
from benchmarks.trials import Plan
from tests.loops import LOOPS, Recorder, fit


class Dropping(Recorder):
    """Is asked to leave inside one batch of the run, before it has done anything."""

    def __init__(self, at: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.total_batch_idx == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        with droppable(self), together(self):
            if stop_requested(self):
                raise RolloutStopped("asked to")
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", LOOPS)
def test_the_run_goes_on_with_the_dropped_batch_wherever_it_is(name: str, tmp_path: Path) -> None:
    settings, trainer = LOOPS[name]
    whole = Recorder(**settings)
    rows = fit(tmp_path, [], module=whole, **trainer)
    batches = [e for e in whole.events if e[0] == "batch"]
    assert len(batches) >= 11
    for at in range(len(batches)):
        folder = tmp_path / str(at)
        stopped, resumed = Dropping(at, **settings), Recorder(**settings)
        keep = [callbacks.Checkpoint(dirpath=folder, every_n_train_steps=1000), callbacks.Signals()]
        logged: list[Any] = []
        with pytest.raises(SystemExit) as stop:
            fit(folder, keep, module=stopped, rows=logged, **trainer)
        assert stop.value.code == 143
        assert [e for e in stopped.events if e[0] == "batch"] == batches[:at]
        logged += fit(folder, [], folder / "last.ckpt", module=resumed, **trainer)
        assert stopped.events + resumed.events == whole.events, at
        assert resumed.end() == whole.end(), at
        assert logged == rows, at


# ---------------------------------------------------------------------- a module that really samples, in a process

TOY = "tests.online_toys.OnlineToy"


def stopped(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run until the planned signal; the checkpoint it left."""
    process = trials.start(plan, folder)
    process.join(300)
    code = 130 if plan.stop_signal == signal.SIGINT else 143
    assert process.exitcode == code, (folder / "output.txt").read_text()[-2000:]
    return load_checkpoint_folder(resolve("last", folder / "checkpoints"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run: 3 epochs of 6 batches, a validation behind each epoch."""
    folder = tmp_path_factory.mktemp("whole")
    trials.finish(Plan(algorithm=TOY, every=1000), folder, attempts=1, timeout=300)
    assert [b["batch"] for b in trials.batches(folder)] == list(range(18))
    return folder


PLACES = [
    (signal.SIGTERM, (1, 3)),  # before anything was trained; inside the first epoch
    (signal.SIGINT, (7, 12)),  # the first batch of the second epoch; its last one
    (signal.SIGUSR1, (13, 18)),  # the first of the third; the very last
]


@pytest.mark.parametrize(("number", "places"), PLACES)
def test_a_signal_while_sampling(number: int, places: tuple[int, ...], whole: Path, tmp_path: Path) -> None:
    plan = Plan(algorithm=TOY, every=1000, stop_signal=number)
    for place in places:
        saved = stopped(replace(plan, stop_in_rollout=place), tmp_path)
        assert trials.batches(tmp_path)[-1]["batch"] == place - 1  # this one was begun ...
        assert saved["global_step"] == saved["alignment"]["batches_seen"] == place - 1  # ... and is not done
    trials.finish(plan, tmp_path, attempts=1, timeout=300)
    assert trials.same_run(tmp_path, whole) == ""


def test_a_signal_while_sampling_for_a_validation(whole: Path, tmp_path: Path) -> None:
    plan = Plan(algorithm=TOY, every=1000)
    for place in (6, 12):
        saved = stopped(replace(plan, stop_in_rollout=place, in_validation=True), tmp_path)
        assert saved["global_step"] == place
    trials.finish(plan, tmp_path, attempts=1, timeout=300)
    assert trials.same_run(tmp_path, whole) == ""
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["validation"] for e in events if "validation" in e] == [6, 6, 12, 12, 18]  # each anew from its beginning


@pytest.mark.parametrize("algorithm", [TOY, "tests.online_toys.DeafToy"], ids=["both notice", "one notices"])
def test_two_processes_drop_together(algorithm: str, tmp_path: Path) -> None:
    plan = Plan(algorithm=algorithm, every=1000, epochs=2, world_size=2)
    trials.finish(plan, tmp_path / "whole", attempts=1, timeout=300)
    folder = tmp_path / "stopped"
    for place in (3, 7):
        saved = stopped(replace(plan, stop_in_rollout=place), folder)  # sent to rank 0 only
        assert saved["global_step"] == saved["alignment"]["batches_seen"] == place - 1
    trials.finish(plan, folder, attempts=1, timeout=300)
    assert trials.same_run(folder, tmp_path / "whole") == ""
