"""PreferenceData that follows rows while they arrive: what each batch holds, under a clock and writers made by hand."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.feedback_writer import append_row
from alignment.tiny import tiny_tokenizer
from callbacks import Checkpoint, Signals
from datamodules import FollowConfig, PreferenceData, UnpairedData
from modules import DPO, KTO, GeneralizedRPO, RewardModel
from tests.toys import OPTIM, TINY, trainer


def pair(n: int | str, **columns: Any) -> dict[str, Any]:
    return {"prompt": f"Question {n}?", "chosen": f"yes {n}", "rejected": f"no {n}", **columns}


class Writer:
    """Time passes with each sleep and each batch; rows are written when it is their time."""

    def __init__(self, path: Path, arrivals: Mapping[float, Sequence[Any]] | None = None, batch: float = 60.0) -> None:
        self.path, self.arrivals, self.batch = path, dict(arrivals or {}), batch
        self.time = self.slept = 0.0

    def now(self) -> float:
        for at in [at for at in sorted(self.arrivals) if at <= self.time]:
            for row in self.arrivals.pop(at):
                if isinstance(row, str):
                    with self.path.open("a", encoding="utf-8") as file:
                        file.write(row)
                else:
                    append_row(self.path, row)
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time, self.slept = self.time + seconds, self.slept + seconds


class Seen(L.Callback):
    """When each batch came, and the questions in it."""

    def __init__(self, data: Any, clock: Writer) -> None:
        self.data, self.clock = data, clock
        self.batches: list[tuple[float, list[str]]] = []
        self.validated: list[list[str]] = []

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        self.data.stream.clock, self.data.stream.sleep = self.clock.now, self.clock.sleep

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((self.clock.time, asked(module, batch)))

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, *args: Any) -> None:
        self.validated.append(asked(module, batch))

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.time += self.clock.batch


def asked(module: Any, batch: Any) -> list[str]:
    prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
    texts = [module.tokenizer.decode(ids.tolist()) for ids in prompts]
    return [text.split("Question ")[1].split("?")[0] for text in texts]


def data(path: Path, kind: Any = PreferenceData, **settings: Any) -> Any:
    follow = {"quiet": 0.0, **settings.pop("follow", {})}
    given = {"batch_size": 2, "val_fraction": 0.0, "cache_dir": None}
    return kind(str(path), follow=FollowConfig(**follow), **(given | settings))


def run(
    source: Any, folder: Path, clock: Writer | None = None, module: Any = None, start: Any = None, **settings: Any
) -> Seen:
    """Train until there are no more rows."""
    seen = Seen(source, clock or Writer(Path(source.path)))
    module = module or DPO(policy=TINY, optim=OPTIM, reference="copy")
    callbacks = [seen, *settings.pop("callbacks", [])]
    given = {"max_epochs": -1, "num_sanity_val_steps": 0, "plugins": [SafeCheckpointIO()]}
    trainer(folder, callbacks=callbacks, **(given | settings)).fit(module, datamodule=source, ckpt_path=start)
    return seen


def questions(seen: Seen) -> list[list[str]]:
    return [prompts for _, prompts in seen.batches]


# ---------------------------------------------------------------------- what arrives


def test_rows_arrive_during_a_run(tmp_path: Path) -> None:
    """Two begin a round: three are there at 0; one of 300 waits until another has come at 500; and one of 900, found at
    980, is alone for the quiet time of 1,000."""
    path = tmp_path / "rows.jsonl"
    arrivals = {0.0: map(pair, "abc"), 300.0: [pair("d")], 500.0: [pair("e")], 900.0: [pair("f")]}
    clock = Writer(path, {at: list(rows) for at, rows in arrivals.items()})
    source = data(path, follow={"rows": 2, "quiet": 1000.0, "poll": 100.0})
    seen = run(source, tmp_path, clock)
    assert seen.batches == [
        (0.0, ["a", "b"]),
        (60.0, ["c"]),
        (520.0, ["d", "e"]),
        (1980.0, ["f"]),
    ]
    assert source.report.used_for == {"train": 6}


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = json.dumps(pair("torn")) + "\n"
    clock = Writer(path, {0.0: [pair("a"), line[:20]], 100.0: [line[20:]]})
    seen = run(data(path, follow={"quiet": 200.0, "poll": 10.0}), tmp_path, clock)
    assert questions(seen) == [["a"], ["torn"]]


def test_rotation_during_a_run(tmp_path: Path) -> None:
    """The file gets another name while it is read, and another file its name."""
    folder = tmp_path / "rows"
    folder.mkdir()
    path = folder / "rows.jsonl"
    clock = Writer(path, {0.0: list(map(pair, "abcd"))})

    class Rotates(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                path.rename(folder / "rows.jsonl.1")
                append_row(path, pair("e"))
                append_row(folder / "rows.jsonl.1", pair("late"))

    clock.now()
    seen = run(data(folder), tmp_path, clock, callbacks=[Rotates()])
    assert questions(seen) == [["a", "b"], ["c", "d"], ["late", "e"]]


def test_a_folder_and_a_table_give_the_same_run(tmp_path: Path) -> None:
    """Batches, old rows, held-out rows and metrics."""
    found = []
    for name in ("folder", "rows.db"):
        path = tmp_path / name
        if name == "folder":
            path.mkdir()
        for n in range(20):
            append_row(path, pair(n))
        source = data(path, val_fraction=0.2, batch_size=4, follow={"replay": 0.5, "epoch": 3})
        module = DPO(policy=TINY, optim=OPTIM, reference="copy")
        seen = run(source, tmp_path, module=module)
        found.append((seen.batches, seen.validated, module.trainer.callback_metrics["val/loss"].item()))
    assert found[0] == found[1]
    assert found[0][1]


def test_bad_rows_are_told_with_their_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    bad = ["{broken\n", "[]\n", json.dumps(pair("x") | {"chosen": None}) + "\n", json.dumps({"text": "x"}) + "\n"]
    same = {"prompt": "Question s?", "chosen": "alike", "rejected": "alike"}
    clock = Writer(path, {0.0: [bad[0], pair("a"), *bad[1:], "\n", same, pair("a")]})
    source = data(path, batch_size=8)
    assert questions(run(source, tmp_path, clock)) == [["a", "a"]]  # a row that repeats another is a row
    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert f"5 rows of {path} are left out: row 1 not valid JSON" in line
    assert "row 3 row has the wrong type" in line
    assert "row 4 chosen is None" in line
    report = source.report
    assert (report.read, report.used, report.skipped) == (7, 2, 5)
    assert report.dropped["chosen equals rejected"].places == ["row 7"]


def test_the_first_bad_row_may_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    clock = Writer(path, {0.0: [pair("a"), "[]\n"]})
    with pytest.raises(UserError, match=r"rows.jsonl' row 2: row has the wrong type .*; mend it, or set on_bad_row"):
        run(data(path, on_bad_row="stop"), tmp_path, clock)


def test_margins_of_some_rows(tmp_path: Path) -> None:
    """A reward model takes a row without a margin as one of margin 0."""
    path = tmp_path / "rows.jsonl"
    clock = Writer(path, {0.0: [pair("a", margin=1.0), pair("b", weight=2.0), pair("c")]})
    source = data(path, batch_size=4)
    seen = run(source, tmp_path, clock, module=RewardModel(policy=TINY, optim=OPTIM))
    assert questions(seen) == [["a", "b", "c"]]


def test_labelled_completions(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Question {n}?", "completion": f"so {n}", "label": n % 2 == 0} for n in range(5)]
    source = data(path, UnpairedData)
    module = KTO(policy=TINY, optim=OPTIM, reference="copy")
    assert questions(run(source, tmp_path, Writer(path, {0.0: rows}), module)) == [["0", "1"], ["2", "3"], ["4"]]


def test_rows_are_renamed_by_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"q": "Question 1?", "good": "a", "bad": "b"}, pair(2)]
    source = data(path, columns={"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert questions(run(source, tmp_path, Writer(path, {0.0: rows}))) == [["1"]]
    assert list(source.report.dropped) == ["key 'q' is missing"]


# ---------------------------------------------------------------------- old rows


def test_old_rows_have_their_share(tmp_path: Path) -> None:
    """A quarter of eight is two: the first batch has no old rows, the others six new ones and two old, the short last
    one of three new rows one old."""
    path = tmp_path / "rows.jsonl"
    clock = Writer(path, {0.0: [pair(n) for n in range(8 + 6 + 3)]})
    module = DPO(policy=TINY, optim=OPTIM, reference="copy")
    batches = questions(run(data(path, batch_size=8, follow={"replay": 0.25}), tmp_path, clock, module))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert [batch[:n] for batch, n in zip(batches, (8, 6, 3), strict=True)] == [
        [str(n) for n in range(8)],
        [str(n) for n in range(8, 14)],
        ["14", "15", "16"],
    ]
    assert set(batches[1][6:]) <= set(batches[0])
    assert len(set(batches[1][6:])) == 2
    assert set(batches[2][3:]) <= {str(n) for n in range(14)}
    logged = module.trainer.callback_metrics
    assert [logged[f"feedback/{name}"].item() for name in ("rows", "new", "held_out")] == [17, 0.75, 0]


def test_between_new_rows_it_may_train_on_old_ones(tmp_path: Path) -> None:
    """It looks every third batch; each batch takes a minute."""
    path = tmp_path / "rows.jsonl"
    clock = Writer(path, {0.0: [pair("a"), pair("b")], 70.0: [pair("c")]})
    source = data(path, follow={"wait": False, "every": 3, "quiet": None})
    batches = questions(run(source, tmp_path, clock, max_steps=6))
    assert [sorted(batch) for batch in batches[:4]] == [["a", "b"], ["a", "b"], ["a", "b"], ["c"]]
    assert all(set(batch) < {"a", "b", "c"} and len(set(batch)) == 2 for batch in batches[4:])
    assert clock.slept == 0.0


def test_the_memory_is_a_fair_sample(tmp_path: Path) -> None:
    """Ten of a hundred rows are kept, each with the same chance: over 200 seeds a row is kept 20 times, give or take
    4.2 (binomial), of which each lies within four."""
    path = tmp_path / "rows.jsonl"
    source = data(path, follow={"replay": 0.5, "memory": 10}, tokenizer=tiny_tokenizer())
    counts = dict.fromkeys(range(100), 0)
    for seed in range(200):
        stream = source._new_stream(source.follow)
        object.__setattr__(stream.rules, "seed", seed)
        stream._remember(range(100))  # what a row is does not matter here
        assert len(stream.standing.memory) == len(set(stream.standing.memory)) == 10
        for row in stream.standing.memory:
            counts[row] += 1
    assert sum(counts.values()) == 2000
    assert max(abs(count - 20) for count in counts.values()) < 17
    assert abs(sum(counts[n] for n in range(10)) - 200) < 60  # the first ones among them


# ---------------------------------------------------------------------- validation


def test_rows_are_held_out_by_their_prompt(tmp_path: Path) -> None:
    """Whatever comes when; all rows of a prompt on one side; validated on as soon as they have come."""
    path = tmp_path / "rows.jsonl"
    rows = [pair(n) for n in range(30)] + [pair(n, chosen="another") for n in range(30)]
    source = data(path, val_fraction=0.3, batch_size=6, follow={"epoch": 2})
    seen = run(source, tmp_path, Writer(path, {0.0: rows}))
    trained = [n for batch in questions(seen) for n in batch]
    held = source.stream.standing.held
    kept = {json.loads(row.text)["prompt"].split()[1][:-1] for row in held}
    assert len(trained) + len(held) == 60
    assert not kept & set(trained)
    assert 3 <= len(kept) <= 16  # 9 expected; further away in one of a thousand cases
    assert set() < {n for batch in seen.validated for n in batch} <= kept
    other = data(path, val_fraction=0.3, batch_size=6)
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    run(other, tmp_path)
    assert {json.loads(row.text)["prompt"].split()[1][:-1] for row in other.stream.standing.held} == kept


def test_validation_rows_of_their_own(tmp_path: Path) -> None:
    """They are fixed, and their prompts are not trained on."""
    path, fixed = tmp_path / "rows.jsonl", tmp_path / "val.jsonl"
    fixed.write_text("".join(json.dumps(pair(n)) + "\n" for n in "ab"))
    source = data(path, val_path=str(fixed), val_fraction=0.5, follow={"epoch": 1})
    seen = run(source, tmp_path, Writer(path, {0.0: list(map(pair, "abcd"))}))
    assert questions(seen) == [["c", "d"]]
    assert seen.validated == [["a", "b"]]
    assert source.report.dropped["prompt is among the held-out rows"].places == ["row 1", "row 2"]


def test_so_many_held_out_rows_at_most(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    source = data(path, val_fraction=0.5, max_eval_rows=2)
    run(source, tmp_path, Writer(path, {0.0: [pair(n) for n in range(12)]}))
    report = source.report
    assert report.used_for["val"] == 2
    assert report.used_for["train"] + 2 + report.dropped["held out beyond max_eval_rows"].count == 12


def test_validate_takes_the_rows_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    source = data(path, val_fraction=0.5)
    keep = Checkpoint(dirpath=tmp_path / "checkpoints")
    clock = Writer(path, {0.0: [pair(n) for n in range(8)]})
    run(source, tmp_path, clock, callbacks=[keep], enable_checkpointing=True)
    count = len(source.stream.standing.held)
    assert count
    path.unlink()
    again = data(path, val_fraction=0.5)
    checker = trainer(tmp_path, plugins=[SafeCheckpointIO()])
    module = DPO(policy=TINY, optim=OPTIM, reference="copy")
    checker.validate(module, datamodule=again, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert len(again.groups("val")) == len(again.groups("test")) == count
    assert "val/loss" in checker.callback_metrics


# ---------------------------------------------------------------------- leaving and coming back


class Saves(L.Callback):
    """Saves after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """From each of its steps, inside and between rounds and epochs: the same batches, the same weights; the file has
    been rotated away meanwhile, and what a run held in its memory and held out is in the checkpoint."""
    path = tmp_path / "rows.jsonl"
    settings: Any = {"val_fraction": 0.2, "batch_size": 4, "follow": {"replay": 0.25, "memory": 5, "epoch": 2}}
    whole = data(path, **settings)
    module = DPO(policy=TINY, optim=OPTIM, reference="copy")
    clock = Writer(path, {0.0: [pair(n) for n in range(14)], 150.0: [pair(n) for n in range(14, 22)]})
    seen = run(whole, tmp_path, clock, module, callbacks=[Saves(tmp_path)])
    assert len(seen.batches) >= 5
    assert len(whole.stream.standing.held) >= 2
    path.rename(tmp_path / "rows.jsonl.1")
    for step in (1, 3, len(seen.batches) - 1):
        rest, again = data(path, **settings), DPO(policy=TINY, optim=OPTIM, reference="copy")
        resumed = run(rest, tmp_path, None, again, start=tmp_path / f"{step}.ckpt")
        assert questions(resumed) == questions(seen)[step:], step
        for kept in ("memory", "held"):
            ours, theirs = (getattr(source.stream.standing, kept) for source in (rest, whole))
            assert [(row.number, row.text) for row in ours] == [(row.number, row.text) for row in theirs]
        for ours, theirs in zip(again.parameters(), module.parameters(), strict=True):
            assert ours.equal(theirs)


def test_a_batch_that_was_not_used_is_given_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for n in range(12):
        append_row(path, pair(n))
    source = data(path, val_fraction=0.3, follow={"replay": 0.5}, tokenizer=tiny_tokenizer())
    source.setup("fit")
    stream = source.stream
    stream.batch()
    before = stream.state_dict()
    first = stream.batch()
    after = stream.state_dict()
    stream.put_back()
    assert stream.state_dict() == before != after
    assert stream.batch() == first
    assert stream.state_dict() == after


def test_a_signal_while_it_waits(tmp_path: Path) -> None:
    """It saves and leaves at once, and goes on with what has come meanwhile."""
    path = tmp_path / "rows.jsonl"
    clock = Writer(path, {0.0: list(map(pair, "abc"))})
    sleep = clock.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if clock.slept == 5.0:
            os.kill(os.getpid(), signal.SIGTERM)

    clock.sleep = interrupted  # type: ignore[method-assign]
    keep = Checkpoint(dirpath=tmp_path / "checkpoints")
    with pytest.raises(SystemExit) as left:
        run(
            *(data(path, follow={"quiet": None}), tmp_path, clock),
            **{"callbacks": [Signals(), keep], "enable_checkpointing": True},
        )
    assert left.value.code == 143
    assert clock.slept == 5.0
    append_row(path, pair("d"))
    seen = run(data(path), tmp_path, start=tmp_path / "checkpoints" / "last.ckpt")
    assert questions(seen) == [["d"]]


# ---------------------------------------------------------------------- mistakes


def test_a_short_trial_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    clock = Writer(path)
    assert run(data(path, follow={"quiet": None}), tmp_path, clock, fast_dev_run=1).batches == []
    clock = Writer(path, {0.0: [pair("a")]})
    source = data(path, follow={"quiet": None, "rows": 5})
    assert questions(run(source, tmp_path, clock, fast_dev_run=1)) == [["a"]]
    assert clock.slept == 0.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"length_aware": True}, "length_aware does not go with rows that are still to come"),
        ({"drop_last": True}, "drop_last does not go"),
        ({"num_workers": 2}, "num_workers does not go"),
        ({"max_rows": 5}, "max_rows does not go"),
        ({"mix": {"column": "source", "ratio": {"a": 1}}}, "mix does not go"),
        ({"val_split": "test"}, "val_split needs a val_path"),
        ({"path": "world:support"}, "data.follow needs data.path"),
        ({"follow": {"rows": 0}}, "data.follow.rows must be at least 1"),
        ({"follow": {"replay": 1.0}}, "data.follow.replay is 1"),
        ({"follow": {"poll": 0.0}}, "poll is 0"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        data(**({"path": tmp_path / "rows.jsonl"} | settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda: DPO(policy=TINY, optim=OPTIM, reference="cached"), "reference: cached needs rows that are all known"),
        (lambda: DPO(policy=TINY, optim=OPTIM, loss="modpo", margins={"m": 0.5}), "margins need rows that are all"),
        (
            lambda: GeneralizedRPO(policy=TINY, optim=OPTIM, domains={"column": "source"}),  # type: ignore[arg-type]
            "domains need rows that are all known",
        ),
    ],
)
def test_runs_that_need_all_rows(module: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(data(tmp_path / "rows.jsonl"), tmp_path, module=module())


def test_places_and_stages_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.follow: there is no folder"):
        run(data(tmp_path / "none"), tmp_path)
    with pytest.raises(UserError, match="needs rows that are all there"):
        data(tmp_path / "rows.jsonl").plan()
    with pytest.raises(UserError, match="overfit_batches needs rows that are all there"):
        run(data(tmp_path / "rows.jsonl"), tmp_path, overfit_batches=1)
