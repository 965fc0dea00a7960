"""OnlineHeadUpdate: what the job does with rows that arrive, under a fast clock, and its resume. test_feedback.py has
the files themselves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.feedback_writer import append_row
from alignment.rewards.support import right
from callbacks import Checkpoint, OnlineHeadUpdate, Signals
from datamodules import PromptData, StrataConfig
from modules import GRPO
from tests.rl_toys import Watch, fit, here, odd, online
from tests.toys import trainer
from tests.unit.test_decoupled_po import REWARDS, Weights, decoupled, weights_of

HOUR = 3600.0


def rated(completion: str, completion_ids: list[int], rating: float) -> float:
    """A reward that reads a column of the feedback."""
    return rating * odd(completion, completion_ids)


RATED = REWARDS | {"low": here(rated)}


def row(n: int, **columns: Any) -> str:
    return json.dumps({"prompt": f"Question {n}?", "rating": 1.0, **columns}) + "\n"


def write(path: Path, *lines: str, mode: str = "a") -> Path:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(lines)
    return path


class Clock:
    """Each sleep and each batch takes its time; what arrives when is written at its time, once."""

    def __init__(self, path: Path, arrivals: dict[float, Sequence[str]], batch: float = 60.0) -> None:
        self.path, self.arrivals, self.batch = path, dict(arrivals), batch
        self.time, self.slept = 0.0, 0.0

    def now(self) -> float:
        for at in [at for at in self.arrivals if at <= self.time]:
            write(self.path, *self.arrivals.pop(at))
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time, self.slept = self.time + seconds, self.slept + seconds


class Job(L.Callback):
    """What each batch was: its time, whose it was, how many prompts and which."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: list[tuple[float, str | None, list[str]]] = []

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        collect = module.collect

        def watched(batch: Any) -> Any:
            prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
            asked = [module.tokenizer.decode(ids.tolist()).split("user\n")[1].split("<")[0] for ids in prompts]
            self.seen.append((self.clock.time, module.only, asked))
            return collect(batch)

        module.collect = watched

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.time += self.clock.batch


def job(path: Path, arrivals: dict[float, Sequence[str]], start: float = 0.0, **settings: Any) -> tuple[Any, ...]:
    """The callback under a clock of its own, and what it did."""
    clock = Clock(path, arrivals)
    clock.time = start
    update = OnlineHeadUpdate("low", str(path), **settings)
    update.clock, update.sleep = clock.now, clock.sleep
    return update, Job(clock), clock


def data(folder: Path, **settings: Any) -> PromptData:
    rows = [{"prompt": f"Data {n}?", "rating": 1.0} for n in range(8)]
    path = write(folder / "data.jsonl", *(json.dumps(r) + "\n" for r in rows), mode="w")
    given = {"batch_size": 2, "shuffle": False, "val_fraction": 0.0, "cache_dir": None}
    return PromptData(str(path), **(given | settings))


def runs(module: Any, folder: Path, *callbacks: L.Callback, batches: int, **settings: Any) -> Watch:
    source = settings.pop("data", None) or data(folder)
    given = {"max_steps": batches, "max_epochs": -1, "num_sanity_val_steps": 0}
    return fit(module, folder, source, callbacks=list(callbacks), **(given | settings))[0]


# ---------------------------------------------------------------------- the job


def test_every_hour_what_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing for an hour; then three rows in two batches of one head; two that come later wait for the next hour."""
    told: list[str] = []
    monkeypatch.setattr("callbacks.online_head_update.rank_zero_info", told.append)
    path = tmp_path / "feedback.jsonl"
    arrivals = {600.0: [row(1), row(2), row(3)], 3650.0: [row(4)], 5000.0: [row(5)]}
    update, seen, _ = job(path, arrivals, poll=10.0)
    weights = Weights()
    runs(decoupled(rewards=RATED), tmp_path, update, seen, weights, batches=3)
    assert seen.seen == [
        (3600.0, "low", ["Question 1?", "Question 2?"]),
        (3660.0, "low", ["Question 3?"]),
        (7200.0, "low", ["Question 4?", "Question 5?"]),
    ]
    assert weights.moved() == [{"low"}] * 3
    assert [text.rpartition("; ")[2] for text in told] == ["the next look is in 3600 s", "the next look is in 3480 s"]


def test_between_rounds_it_may_train_on_the_data(tmp_path: Path) -> None:
    """A batch takes a minute: after the hour one of them is of the feedback, in place of the data's."""
    path = write(tmp_path / "feedback.jsonl", row(1))
    update, seen, clock = job(path, {60.0: [row(2)]}, wait=False, every=120.0)
    runs(decoupled(rewards=RATED), tmp_path, update, seen, batches=4)
    assert seen.seen == [
        (0.0, "low", ["Question 1?"]),
        (60.0, None, ["Data 2?", "Data 3?"]),
        (120.0, "low", ["Question 2?"]),
        (180.0, None, ["Data 6?", "Data 7?"]),
    ]
    assert clock.slept == 0.0


def test_damaged_rows_are_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = ["{broken\n", '{"rating": 1.0}\n', '{"prompt": "No rating?"}\n', '{"prompt": null, "rating": 1}\n']
    lines = [bad[0], row(1), *bad[1:], row(2)]
    update, seen, _ = job(write(tmp_path / "feedback.jsonl", *lines), {})
    runs(decoupled(rewards=RATED), tmp_path, update, seen, batches=1, data=data(tmp_path, batch_size=6))
    assert [prompts for _, _, prompts in seen.seen] == [["Question 1?", "Question 2?"]]
    told = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(told) == 1
    assert "4 rows of " in told[0]
    assert "row 1 not valid JSON" in told[0]
    assert "row 4 key 'rating' is missing" in told[0]
    assert "the head of low learns from rows 1 to 6 of " in caplog.text


def test_rows_without_what_a_shipped_reward_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = {"prompt": "How long?", "answer": "3 years", "attribute": "warranty"}
    rows = [known, {**known, "attribute": None}, {"prompt": "And this?", "answer": "5"}]
    update, seen, _ = job(write(tmp_path / "feedback.jsonl", *(json.dumps(r) + "\n" for r in rows)), {})
    rewards = REWARDS | {"low": here(right)}
    runs(decoupled(rewards=rewards), tmp_path, update, seen, batches=1, data=data(tmp_path, batch_size=4))
    assert [prompts for _, _, prompts in seen.seen] == [["How long?"]]
    assert "row 2 attribute is None; row 3 key 'attribute' is missing" in caplog.text
    assert "abstains" not in caplog.text


def test_a_batch_of_damaged_rows_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "feedback.jsonl", *["{}\n"] * 4, "\n", row(1), "[]\n")
    update, seen, _ = job(path, {200.0: [row(2)]}, every=300.0)
    runs(decoupled(rewards=RATED), tmp_path, update, seen, batches=2)
    assert [(at, prompts) for at, _, prompts in seen.seen] == [(0.0, ["Question 1?"]), (300.0, ["Question 2?"])]


def test_prompts_of_no_stratum_do_not_disturb_grades(tmp_path: Path) -> None:
    strata = StrataConfig(by="measured", regrade_every=1, order="shuffle", ratio={"easy": 1, "hard": 1}, rates=[0.5])
    update, seen, _ = job(write(tmp_path / "feedback.jsonl", row(1)), {}, wait=False)
    source = data(tmp_path, strata=strata)
    runs(decoupled(rewards=RATED), tmp_path, update, seen, batches=3, data=source)
    assert [only for _, only, _ in seen.seen] == ["low", None, None]


def test_validation_is_the_datas(tmp_path: Path) -> None:
    update, seen, _ = job(write(tmp_path / "feedback.jsonl", *map(row, range(8))), {})
    rows = data(tmp_path, val_path=str(write(tmp_path / "val.jsonl", row(99))))
    module = decoupled(rewards=RATED)
    watch = runs(module, tmp_path, update, seen, batches=4, data=rows, limit_val_batches=1)
    assert len(watch.updates) == 4
    assert "val/reward" in module.trainer.callback_metrics


def test_a_short_trial_does_not_wait(tmp_path: Path) -> None:
    update, seen, clock = job(tmp_path / "feedback.jsonl", {})
    runs(decoupled(rewards=RATED), tmp_path, update, seen, batches=1, fast_dev_run=True)
    assert [only for _, only, _ in seen.seen] == [None]
    assert clock.slept == 0.0


def test_a_folder_and_a_table_are_read_as_a_file_is(tmp_path: Path) -> None:
    """Two rows each, one of which comes later; a round begins with both."""
    for kind in ("folder", "rows.db"):
        path = tmp_path / kind
        if kind == "folder":
            path.mkdir()
        append_row(path, json.loads(row(1)))
        update, seen, clock = job(path, {}, every=100.0, rows=2, poll=50.0)
        sleep = update.sleep

        def slept(seconds: float, path: Path = path, clock: Clock = clock, sleep: Any = sleep) -> None:
            sleep(seconds)
            if clock.time == 50.0:
                append_row(path, json.loads(row(2)))

        update.sleep = slept
        runs(decoupled(rewards=RATED), tmp_path, update, seen, batches=1)
        assert seen.seen == [(100.0, "low", ["Question 1?", "Question 2?"])]


def test_it_ends_when_no_more_rows_come(tmp_path: Path) -> None:
    """Rows at 0 and 150 s, then none for 160 s. The batch that it waited in leaves no trace."""
    update, seen, clock = job(tmp_path / "feedback.jsonl", {0.0: [row(1)], 150.0: [row(2)]}, every=100.0, quiet=160.0)
    keep = Checkpoint(dirpath=tmp_path / "checkpoints")
    module = decoupled(rewards=RATED)
    settings = {"plugins": [SafeCheckpointIO()], "enable_checkpointing": True}
    runs(module, tmp_path, update, seen, keep, batches=9, **settings)
    assert [prompts for _, _, prompts in seen.seen] == [["Question 1?"], ["Question 2?"]]
    assert module.trainer.global_step == module.batches_seen == 2
    assert module.trainer.fit_loop.epoch_loop.batch_progress.total.ready == 2
    left = clock.time
    update, seen, clock = job(tmp_path / "feedback.jsonl", {left: [row(3)]}, start=left, every=100.0)
    module = decoupled(rewards=RATED)
    limits = {"limit_val_batches": 0, "max_steps": 3, "max_epochs": -1}
    run = trainer(tmp_path, callbacks=[update, seen], plugins=[SafeCheckpointIO()], **limits)
    run.fit(module, datamodule=data(tmp_path), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert [prompts for _, _, prompts in seen.seen] == [["Question 3?"]]


# ---------------------------------------------------------------------- leaving and coming back


class Saves(L.Callback):
    """Saves after some batches and ends the run; as the first of the callbacks, before any other has seen the end of
    the batch."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if module.batches_seen == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_resume(wait: bool, after: int, tmp_path: Path) -> None:
    """In the middle of a round, after one, and between two; the clock goes on where it stood."""
    arrivals = {0.0: list(map(row, range(3))), 150.0: list(map(row, range(3, 7)))}
    ends, batches, time = [], [], 0.0
    for leave, start in ((None, None), (after, None), (None, tmp_path / "here.ckpt")):
        path = tmp_path / "feedback.jsonl"
        if start is None:
            path.unlink(missing_ok=True)
        left = {at: lines for at, lines in arrivals.items() if start is None or at > time}
        update, seen, clock = job(path, left, start=0.0 if start is None else time, wait=wait, every=200.0)
        module = decoupled(rewards=RATED)
        extra = [] if leave is None else [Saves(leave, tmp_path / "here.ckpt")]
        run = trainer(
            tmp_path,
            callbacks=[*extra, update, seen],
            plugins=[SafeCheckpointIO()],
            limit_val_batches=0,
            max_steps=6 if not wait else 4,
            max_epochs=-1,
        )
        run.fit(module, datamodule=data(tmp_path), ckpt_path=start)
        ends.append(weights_of(module))
        batches.append(seen.seen)
        if leave is not None:
            time = clock.time
            clock.now()  # whatever has arrived by then is in the file
    assert batches[1] + batches[2] == batches[0]
    assert ends[2] == ends[0] != ends[1]


def test_a_signal_while_it_waits(tmp_path: Path) -> None:
    """It saves and leaves at once; the job that goes on reads what has come meanwhile, and nothing twice."""
    path = write(tmp_path / "feedback.jsonl", row(1))
    update, seen, clock = job(path, {}, poll=10.0)
    sleep = update.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if clock.slept == 50.0:
            os.kill(os.getpid(), signal.SIGTERM)

    update.sleep = interrupted
    keep = Checkpoint(dirpath=tmp_path / "checkpoints")
    with pytest.raises(SystemExit) as left:
        runs(
            *(decoupled(rewards=RATED), tmp_path, update, seen, Signals(), keep),
            **{"batches": 9, "plugins": [SafeCheckpointIO()], "enable_checkpointing": True},
        )
    assert left.value.code == 143
    assert clock.slept == 50.0
    assert len(seen.seen) == 1
    write(path, row(2))
    update, seen, clock = job(path, {}, start=clock.time, poll=10.0)
    run = trainer(
        tmp_path,
        callbacks=[update, seen, Signals(), Checkpoint(dirpath=tmp_path / "checkpoints")],
        plugins=[SafeCheckpointIO()],
        enable_checkpointing=True,
        limit_val_batches=0,
        max_steps=2,
        max_epochs=-1,
    )
    run.fit(decoupled(rewards=RATED), datamodule=data(tmp_path), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert seen.seen == [(3600.0, "low", ["Question 2?"])]


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0.0}, "every is 0"),
        ({"every": float("inf")}, "every is inf"),
        ({"poll": -1.0}, "poll -1"),
        ({"rows": 0}, "rows is 0"),
        ({"quiet": -1.0}, "quiet -1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        OnlineHeadUpdate("low", str(tmp_path / "x.jsonl"), **settings)


@pytest.mark.parametrize(
    ("module", "head", "said"),
    [
        (lambda: online(GRPO), "odd", "needs a policy with heads"),
        (decoupled, "tone", "no head of a reward 'tone'; there are odd, low, length"),
        (lambda: decoupled(rewards=REWARDS | {"low": here(weight=0.0)}), "low", "no head of a reward 'low'"),
        (lambda: decoupled(dynamic_sampling=1), "low", "dynamic_sampling would put other prompts"),
    ],
)
def test_wrong_runs(module: Any, head: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        runs(module(), tmp_path, OnlineHeadUpdate(head, str(tmp_path / "x.jsonl")), batches=1)
    assert "\n" not in str(caught.value)


def test_two_of_them(tmp_path: Path) -> None:
    two = [OnlineHeadUpdate(head, str(tmp_path / "x.jsonl")) for head in ("low", "odd")]
    with pytest.raises(UserError, match="given twice"):
        runs(decoupled(), tmp_path, *two, batches=1)


def test_data_that_cannot_read_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="FixedData cannot"):
        fit(decoupled(), tmp_path, callbacks=[OnlineHeadUpdate("low", str(tmp_path / "x.jsonl"))])
