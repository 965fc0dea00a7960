"""R14: a signal while completions are sampled drops the batch; whoever resumes begins with it, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import callbacks
from alignment.rollout import RolloutStopped
from alignment.stopping import droppable, stop_requested, together
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
