"""C21, R1, R14, R15: a run that was interrupted and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import itertools
import json
import random
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Checkpoint

from alignment.checkpoint import resolve
from benchmarks import trials
from benchmarks.trials import ALGORITHMS, Plan
from tests.loops import LOOPS, STEPS, Eager, Recorder, fit

# ---------------------------------------------------------------------- Lightning's loops, at every place one can save


@dataclass
class Saved:
    path: Path
    place: str
    events: int
    rows: int
    step: int


class SaveEverywhere(Checkpoint):
    """Saves wherever a callback can. A Checkpoint, so that Lightning calls it after the module at an epoch's end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, []

    def _save(self, trainer: L.Trainer, place: str) -> None:
        if trainer.sanity_checking:
            return
        path = self.folder / f"{len(self.saved):03d} {place}.ckpt"
        events, rows = len(trainer.lightning_module.events), len(trainer.logger.rows)
        self.saved.append(Saved(path, place, events, rows, trainer.global_step))
        trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "batch")

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._save(trainer, "validation batch")

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "epoch")

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "end")


@pytest.mark.parametrize("name", LOOPS)
def test_resuming_from_every_place_continues_the_same_run(name, tmp_path):
    module, trainer = LOOPS[name]
    whole, save = Recorder(**module), SaveEverywhere(tmp_path)
    rows = fit(tmp_path, [save], module=whole, **trainer)
    assert len(save.saved) > 12
    for saved in save.saved:
        resumed = Recorder(**module)
        resumed_rows = fit(tmp_path, [], saved.path, module=resumed, **trainer)
        assert resumed.end() == whole.end(), saved
        if saved.step == trainer.get("max_steps"):
            continue  # Lightning runs nothing after the last step, not even a validation that was due
        start = saved.events
        if saved.place == "validation batch":  # a validation that was cut short is done from its beginning
            while whole.events[start - 1][0] == "validation":
                start -= 1
        assert resumed.events == whole.events[start:], saved
        if saved.place != "validation batch":
            # A batch's own row is written after the hooks that save.
            assert resumed_rows == rows[saved.rows + (saved.place == "batch") :], saved


def test_four_steps_and_four_more_are_eight(tmp_path):
    whole, first, second = Recorder(), Recorder(), Recorder()
    fit(tmp_path, [], module=whole, max_steps=8, **STEPS)
    save = SaveEverywhere(tmp_path)
    fit(tmp_path, [save], module=first, max_steps=4, **STEPS)
    # The run was over: the checkpoint is that of its end, in the middle of an epoch.
    assert save.saved[-1].place == "end"
    fit(tmp_path, [], save.saved[-1].path, module=second, max_steps=8, **STEPS)
    batches = [e for e in first.events + second.events if e[0] == "batch"]
    assert batches == [e for e in whole.events if e[0] == "batch"]
    assert second.end() == whole.end()


def test_a_loader_that_starts_at_iter_resumes_too(tmp_path):
    """C21: the schedule's length has the loader iterated before its position is known."""
    whole, save = Recorder(estimate=True), SaveEverywhere(tmp_path)
    fit(tmp_path, [save], module=whole, train=Eager(), max_epochs=2)
    for saved in (s for s in save.saved if s.place in ("batch", "epoch")):
        resumed = Recorder(estimate=True)
        fit(tmp_path, [], saved.path, module=resumed, train=Eager(), max_epochs=2)
        assert resumed.events == whole.events[saved.events :], saved
        assert resumed.end() == whole.end(), saved


# ---------------------------------------------------------------------- the algorithms, interrupted for real


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The uninterrupted run of each algorithm."""
    folder = tmp_path_factory.mktemp("whole")
    for algorithm in ALGORITHMS:
        trials.finish(Plan(algorithm=algorithm), folder / algorithm, attempts=1)
    return {algorithm: folder / algorithm for algorithm in ALGORITHMS}


def test_the_run_has_what_the_trials_are_about(whole):
    for folder in whole.values():
        batches = trials.batches(folder)
        assert [b["batch"] for b in batches] == list(range(18))
        epochs = [sorted(i for b in batches[at : at + 6] for i in b["ids"]) for at in (0, 6, 12)]
        assert epochs == [list(range(22))] * 3
        assert batches[0]["ids"] != batches[6]["ids"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_killed_anywhere_and_resumed_it_ends_the_same(algorithm, whole, tmp_path):
    # Once inside a save (an fsync of the second or third one), once at a moment of the clock's choosing.
    plan = Plan(algorithm=algorithm)
    process = trials.start(replace(plan, die_at_sync=random.randrange(8, 20)), tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process = trials.start(plan, tmp_path)
    process.join(random.uniform(0.5, 1.5))
    process.kill()
    process.join()
    trials.finish(plan, tmp_path)
    assert trials.same_run(tmp_path, whole[algorithm]) == ""


STOPS = [
    ("SFT", signal.SIGTERM, (3, 9, 17)),
    ("RewardModel", signal.SIGINT, (6, 12)),
    ("DPO", signal.SIGUSR1, (13, 18)),
]


@pytest.mark.parametrize(("algorithm", "number", "places"), STOPS)
def test_signals_leave_with_their_code_and_the_run_goes_on(algorithm, number, places, whole, tmp_path):
    # Checkpoints only from signals and ends: what resumes is what the signal saved.
    plan = Plan(algorithm=algorithm, every=1000)
    for place in places:
        process = trials.start(replace(plan, stop_after=place, stop_signal=number), tmp_path)
        process.join(30)
        assert process.exitcode == (130 if number == signal.SIGINT else 143)
        assert trials.batches(tmp_path)[-1]["batch"] == place - 1
    trials.finish(plan, tmp_path, attempts=1)
    assert trials.same_run(tmp_path, whole[algorithm]) == ""


def test_five_times_inside_one_epoch(whole, tmp_path):
    plan = Plan(algorithm="DPO", every=1000)
    for place in range(7, 12):
        process = trials.start(replace(plan, stop_after=place), tmp_path)
        process.join(30)
        assert process.exitcode == 143
    trials.finish(plan, tmp_path, attempts=1)
    assert trials.same_run(tmp_path, whole["DPO"]) == ""
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    numbers = [line["batch"] for line in lines if "batch" in line]
    assert numbers == list(range(18))  # not one batch was repeated


@pytest.mark.parametrize("variant", [{"lora": True}, {"optimizer": "adamw_8bit"}], ids=str)
def test_adapters_with_dropout_and_8_bit_moments_resume_too(variant, tmp_path):
    plan = Plan(algorithm="DPO", epochs=2, every=1000, **variant)
    trials.finish(plan, tmp_path / "whole", attempts=1)
    process = trials.start(replace(plan, stop_after=8), tmp_path / "stopped")
    process.join(30)
    assert process.exitcode == 143
    trials.finish(plan, tmp_path / "stopped", attempts=1)
    assert trials.same_run(tmp_path / "stopped", tmp_path / "whole") == ""


def test_the_trials_notice_a_run_that_differs(whole, tmp_path):
    trials.finish(Plan(algorithm="SFT", max_batches=17), tmp_path, attempts=1)
    assert trials.same_run(tmp_path, whole["SFT"]) != ""


def test_the_last_checkpoint_of_a_run_is_that_of_its_end(whole):
    for folder in whole.values():
        paths = list(itertools.islice((folder / "checkpoints").glob("*.ckpt"), 10))
        assert len(paths) == 3  # two that stay and the pointer
        assert resolve("last", folder / "checkpoints").name == "last.ckpt"
