"""PromptData: sources and forms of prompts, difficulty, splits, grading under a Trainer, refills."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.experience import minibatches
from alignment.prompting import PromptSource, concatenate, fill, prompts_of, strata_of
from alignment.protocols import FiniteGroups, SizedBatches
from alignment.rollout import times_before
from datamodules import PromptData, StrataConfig
from datamodules.gym import parts_of

ROWS = [
    {"prompt": f"Question {i}?", "answer": str(i), "difficulty": ("easy", "medium", "hard")[i % 3]} for i in range(60)
]


@pytest.fixture
def make(tmp_path, tiny_tokenizer):
    def build(rows: Sequence[Any] = ROWS, name: str = "rows.jsonl", **settings: Any) -> PromptData:
        file = tmp_path / name
        file.write_text("\n".join(json.dumps(row) for row in rows))
        settings = {"tokenizer": tiny_tokenizer, "cache_dir": None, "val_fraction": 0.0, **settings}
        return PromptData(str(file), **settings)

    return build


def numbers(groups: Sequence[Group]) -> list[int]:
    return [g.index for g in groups]


def labels(groups: Sequence[Group]) -> list[str]:
    return [g.columns["difficulty"] for g in groups]


def text(group: Group, tokenizer: Any) -> str:
    return str(tokenizer.decode(group.prompt))


# ---------------------------------------------------------------------- rows

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2+2?"},
]
FORMS = {
    "prompt": {"prompt": "2+2?"},
    "messages": {"prompt": TURNS[-1:]},
    "chat with an answer": {"messages": [TURNS[-1], {"role": "assistant", "content": "4"}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    "instruction": {"instruction": "2+2?", "input": "", "output": "4"},
    "question": {"question": "2+2?", "answer": "4"},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_asks_the_same(make, tiny_tokenizer, row):
    (group,) = make([row]).groups("train")
    (plain,) = make([{"prompt": "2+2?"}], "plain.jsonl").groups("train")
    assert group.prompt == plain.prompt
    assert list(group.completions) == []
    assert "2+2?" in text(group, tiny_tokenizer)


def test_earlier_turns_stay_and_texts_are_continued_as_they_are(make, tiny_tokenizer):
    (group,) = make([{"messages": TURNS}]).groups("train")
    shown = text(group, tiny_tokenizer)
    assert shown.index("Yes?") < shown.index("2+2?")
    (group,) = make([{"text": "Once upon a time"}], "texts.jsonl").groups("train")
    assert text(group, tiny_tokenizer).removeprefix(tiny_tokenizer.bos_token) == "Once upon a time"


def test_every_other_column_is_kept_whatever_json_can_hold(make):
    extra = {"answer": ["4", "four"], "tests": {"cases": [[1, 2.5], None]}, "output": "4", "weight": 2, "empty": None}
    row = {"prompt": "2+2?", "system": "Be brief.", **extra}
    (group,) = make([row]).groups("train")
    assert dict(group.columns) == extra
    (group,) = make([{"q": "2+2?", "prompt": "other", "a": "4"}], "named.jsonl", columns={"prompt": "q"}).groups(
        "train"
    )
    assert dict(group.columns) == {"a": "4"}


def test_rows_that_ask_nothing_are_dropped_with_a_reason(make):
    rows = [*ROWS[:3], {"prompt": ""}, {"prompt": [{"role": "assistant", "content": "Hi"}]}, {"answer": "4"}, ROWS[0]]
    data = make(rows)
    assert numbers(data.groups("train")) == [0, 1, 2]
    assert {reason: tally.count for reason, tally in data.report.dropped.items()} == {
        "prompt is empty": 1,
        "prompt has no user turn": 1,
        "key 'prompt' is missing": 1,
        "duplicate of an earlier row": 1,
    }
    assert data.report.completion is None
    with pytest.raises(UserError, match=r"is no prompts format.*questions \(question\).*columns: {prompt: question}"):
        make([{"q": "2+2?"}]).groups("train")


def test_the_cache_gives_the_same_prompts(make, tmp_path):
    rows = [{"prompt": "2+2?", "tests": {"cases": [[1, 2.5], None]}}, {"prompt": "3+3?", "tests": {}}]
    first, second = (make(rows, cache_dir=str(tmp_path / "cache")) for _ in range(2))
    assert list(first.groups("train")) == list(second.groups("train"))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_batches_of_prompts_hold_no_completion(make):
    data = make(batch_size=4, seed=1)
    batch = next(iter(data.train_dataloader()))
    assert (batch.num_prompts, batch.num_completions, len(batch.completion_ids)) == (4, 0, 0)
    groups = prompts_of(batch)
    for group in groups:
        stored = data.groups("train")[group.index]
        assert (group.prompt, group.columns, list(group.completions)) == (stored.prompt, stored.columns, [])
    assert isinstance(data, PromptSource)
    assert isinstance(data, SizedBatches)
    assert isinstance(data, FiniteGroups)


# ---------------------------------------------------------------------- splits


def test_no_prompt_is_in_two_splits(make, tmp_path):
    """In other words: case and white space do not make another prompt. Three sources that share some."""
    for name, numbers_ in (("val", range(40, 70)), ("test", range(50, 90))):
        rows = [{"prompt": f"  question   {i}? ", "answer": "0", "difficulty": "easy"} for i in numbers_]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = make(val_path=str(tmp_path / "val.jsonl"), test_path=str(tmp_path / "test.jsonl"))
    assert [len(data.groups(split)) for split in ("train", "val", "test")] == [40, 10, 40]
    assert data.reports["val"].dropped["prompt is among the held-out rows"].count == 20
    only_test = make(test_path=str(tmp_path / "test.jsonl"), val_fraction=0.5)
    train, val, test = (only_test.groups(split) for split in ("train", "val", "test"))
    assert len(train) + len(val) == 50
    assert len(test) == 40
    assert max(numbers(train) + numbers(val)) == 49


# ---------------------------------------------------------------------- difficulty


def test_difficulty_from_a_column_of_names(make):
    data = make(strata=StrataConfig(), batch_size=10, seed=3)
    assert labels(data.groups("train")) == [row["difficulty"] for row in ROWS]
    assert data.report.strata == {"easy": 20, "medium": 20, "hard": 20}
    assert ("difficulty", "20 easy, 20 medium, 20 hard") in data.report.lines()
    for batch in data.train_dataloader():
        assert Counter(strata_of(batch)) == {"easy": 7, "medium": 2, "hard": 1}


def test_difficulty_from_numbers_in_equal_parts_or_within_bounds(make):
    rows = [{"prompt": f"Question {i}?", "score": i // 2} for i in range(18)]  # 0, 0, 1, 1, ... 8, 8
    by = {"by": "column", "column": "score"}
    assert Counter(labels(make(rows, strata=by).groups("train"))) == {"easy": 6, "medium": 6, "hard": 6}
    data = make(rows, strata={**by, "bounds": [0, 6.5]})
    assert labels(data.groups("train")) == ["easy"] * 2 + ["medium"] * 12 + ["hard"] * 4
    text_rows = [{"prompt": f"Question {i}?", "score": str(i)} for i in range(3)]  # as a CSV file gives them
    assert labels(make(text_rows, "text.jsonl", strata=by).groups("train")) == ["easy", "medium", "hard"]


def test_difficulty_from_length_is_that_of_the_training_prompts(make):
    rows = [{"prompt": "x" * (i + 1)} for i in range(30)]
    data = make(rows, strata={"by": "length"}, val_fraction=0.2)
    train, val = data.groups("train"), data.groups("val")
    assert Counter(labels(train)) == {"easy": 8, "medium": 8, "hard": 8}
    sizes = {name: [len(g.prompt) for g in train if g.columns["difficulty"] == name] for name in ("easy", "medium")}
    for group in val:
        n = len(group.prompt)
        expected = "easy" if n <= max(sizes["easy"]) else "medium" if n <= max(sizes["medium"]) else "hard"
        assert group.columns["difficulty"] == expected


def test_other_strata_in_another_ratio(make):
    rows = [{"prompt": f"Question {i}?", "difficulty": "AB"[i % 2]} for i in range(40)]
    data = make(rows, strata={"ratio": {"a": 1, "b": 3}}, batch_size=8)
    for batch in data.train_dataloader():
        assert Counter(strata_of(batch)) == {"a": 2, "b": 6}


def test_curriculum_and_plain_order(make):
    data = make(strata={"order": "curriculum"}, batch_size=20, seed=1)
    assert [set(strata_of(b)) for b in data.train_dataloader()] == [{"easy"}, {"medium"}, {"hard"}]
    plain = make(strata={"order": "shuffle"}, batch_size=20, seed=1)
    assert all(len(set(strata_of(b))) == 3 for b in plain.train_dataloader())
    assert [b.group_index.tolist() for b in plain.train_dataloader()] == [
        b.group_index.tolist() for b in make(batch_size=20, seed=1).train_dataloader()
    ]


def test_rows_without_a_difficulty_are_dropped_and_odd_ones_are_an_error(make):
    rows = [*ROWS[:6], {"prompt": "A?", "difficulty": None}, {"prompt": "B?"}]
    data = make(rows, strata={})
    assert len(data.groups("train")) == 6
    assert {k: t.count for k, t in data.report.dropped.items()} == {
        "difficulty is None": 1,
        "key 'difficulty' is missing": 1,
    }
    with pytest.raises(
        UserError, match="row 7: column 'difficulty' holds 'tough'; a difficulty is a number, or in every"
    ):
        make([*ROWS[:6], {"prompt": "A?", "difficulty": "tough"}], strata={}).groups("train")
    with pytest.raises(UserError, match=r"no training prompt is hard \(2 easy, 2 medium, 0 hard\); set strata.bounds"):
        make([r for r in ROWS[:6] if r["difficulty"] != "hard"], strata={}).groups("train")


@pytest.mark.parametrize(
    ("strata", "message"),
    [
        ({"by": "size"}, "strata.by is 'size'; use column, level, length or measured"),
        ({"by": "measured"}, "strata.by: measured needs strata.regrade_every"),
        ({"order": "curriculum", "regrade_every": 5}, "curriculum needs a difficulty that stays"),
        ({"bounds": [1.0]}, "strata.bounds has 1 numbers for 3 strata"),
        ({"bounds": [2.0, 1.0]}, "strata.bounds must rise"),
        ({"rates": [0.5], "regrade_every": 5}, "strata.rates has 1 numbers for 3 strata"),
        ({"mix": 1}, "StrataConfig has no field mix"),
    ],
)
def test_strata_that_make_no_sense(make, strata, message):
    with pytest.raises(UserError, match=message):
        make(strata=strata)


def test_settings_that_strata_do_not_go_with(make):
    with pytest.raises(UserError, match="length_aware: true would undo"):
        make(strata={}, length_aware=True)
    with pytest.raises(UserError, match="set num_workers to 0"):
        make(strata={"by": "measured", "regrade_every": 5}, num_workers=2)
    with pytest.raises(UserError, match="prompts have no difficulty without"):
        _ = make().grades


# ---------------------------------------------------------------------- sources


def test_the_built_in_world(tiny_tokenizer):
    data = PromptData(tokenizer=tiny_tokenizer, cache_dir=None, max_rows=20, max_eval_rows=5)
    train, val = data.groups("train"), data.groups("val")
    assert (len(train), len(val)) == (20, 5)
    assert all(g.columns["answer"] and g.columns["attribute"] for g in (*train, *val))
    assert not {g.columns["product"] for g in train} & {g.columns["product"] for g in val}


def test_reasoning_gym_by_task_and_level(tiny_tokenizer):
    pytest.importorskip("reasoning_gym")
    path = "reasoning-gym:products@0-1,gcd,chain_sum@3"
    strata = {"by": "level", "bounds": [0, 1]}
    data = PromptData(path, tokenizer=tiny_tokenizer, cache_dir=None, max_rows=80, val_fraction=0.25, strata=strata)
    train, val = data.groups("train"), data.groups("val")
    rows = [g.columns for g in (*train, *val)]
    assert {(r["task"], r["level"]) for r in rows} == {("products", 0), ("products", 1), ("gcd", 0), ("chain_sum", 3)}
    assert {r["difficulty"] for r in rows if r["level"] == 3} == {"hard"}
    products = [r for r in rows if r["task"] == "products"]
    for row in products:  # a level is that level alone: two numbers of one digit, then three of two
        factors = [int(f) for f in row["metadata"]["expression"].split(" * ")]
        assert int(row["answer"]) == math.prod(factors)
        assert len(factors) == row["level"] + 2
        assert {len(str(f)) for f in factors} == {row["level"] + 1}
        assert json.loads(json.dumps(row["metadata"])) == row["metadata"]
    asked = [text(g, tiny_tokenizer) for g in (*train, *val)]
    assert len(set(asked)) == len(asked)
    assert data.report.read == 80


def test_reasoning_gym_paths_that_are_none(tiny_tokenizer, monkeypatch):
    pytest.importorskip("reasoning_gym")
    assert parts_of("reasoning-gym:a@1-2, b") == [("a", 1), ("a", 2), ("b", None)]

    def open_path(path: str) -> None:
        PromptData(path, tokenizer=tiny_tokenizer, cache_dir=None, max_rows=4).groups("train")

    for path, message in [
        ("reasoning-gym:", "expected reasoning-gym:TASK, TASK@LEVEL or TASK@FIRST-LAST"),
        ("reasoning-gym:gcd@2-1", "the levels 2-1 of 'gcd' are none"),
        ("reasoning-gym:sums", "no task 'sums'; it has .*chain_sum"),
        ("reasoning-gym:acre@1", "'acre' has no levels; leave '@1' out"),
        ("reasoning-gym:caesar_cipher@2", r"cannot make 'caesar_cipher' at level 2: rotation must be in range"),
    ]:
        with pytest.raises(UserError, match=message):
            open_path(path)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="needs the package reasoning-gym: pip install"):
        open_path("reasoning-gym:gcd@0")


# ---------------------------------------------------------------------- grading


def with_completions(batch: GroupBatch, n: int) -> GroupBatch:
    groups = [
        Group(prompt=g.prompt, completions=[[5]] * n, columns=g.columns, index=g.index) for g in prompts_of(batch)
    ]
    return GroupBatch.from_groups(groups)


def successes(batch: GroupBatch) -> Tensor:
    """Prompts whose number 5 divides always fail, other odd ones succeed, the rest in every second completion."""
    index = batch.group_index[batch.group_of]
    turn = torch.arange(batch.num_completions) % 2
    return torch.where(index % 5 == 0, 0.0, torch.where(index % 2 == 1, 1.0, turn.float()))


MEASURED = {"by": "measured", "regrade_every": 3, "rollouts": 4}


def test_prompts_are_graded_by_what_the_model_makes_of_them(make):
    data = make(strata=MEASURED, batch_size=20, seed=2)
    assert set(labels(data.groups("train"))) == {"medium"}
    for batch in data.train_dataloader():
        rolled = with_completions(batch, 4)
        data.observe(rolled, successes(rolled))
    expected = ["hard" if i % 5 == 0 else "easy" if i % 2 else "medium" for i in range(60)]
    assert labels(data.groups("train")) == expected
    assert data.groups("train")[7:9][0].columns["difficulty"] == "easy"
    batch = next(iter(data.train_dataloader()))
    assert Counter(strata_of(batch)) == {"easy": 14, "medium": 4, "hard": 2}


def test_completions_without_a_verdict_are_not_counted(make):
    data = make(strata=MEASURED, batch_size=20, seed=2)
    batch = with_completions(next(iter(data.train_dataloader())), 4)
    for _ in range(3):  # 3 known completions in all, 4 are needed
        data.observe(batch, torch.where(torch.arange(batch.num_completions) % 4 == 0, 1.0, float("nan")))
    assert data.grades.version == 0
    for _ in range(3):
        data.observe(batch, torch.where(torch.arange(batch.num_completions) % 4 == 0, 1.0, float("nan")))
    assert Counter(labels(data.groups("train"))) == {"easy": 20, "medium": 40}


def test_observing_without_grading_changes_nothing(make):
    for data in (make(), make(strata={})):
        batch = with_completions(next(iter(data.train_dataloader())), 2)
        data.observe(batch, successes(batch))
        assert data.state_dict()["grades"] == {}


class Learner(L.LightningModule):
    """Observes successes as an online algorithm would; notes the prompts and strata it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[list[int], list[str]]] = []

    def training_step(self, batch: GroupBatch, batch_idx: int) -> Tensor:
        self.seen.append((batch.group_index.tolist(), strata_of(batch)))
        rolled = with_completions(batch, 4)
        self.trainer.datamodule.observe(rolled, successes(rolled))
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(L.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def run(data: PromptData, callbacks: Sequence[L.Callback] = (), resume: Path | None = None, **options: Any) -> Learner:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    learner = Learner()
    settings = {"accelerator": "cpu", "max_epochs": 3, "plugins": [SafeCheckpointIO()], **quiet, **options}
    L.Trainer(callbacks=list(callbacks), **settings).fit(learner, datamodule=data, ckpt_path=resume)
    return learner


def test_c21_resumed_equals_uninterrupted_with_gradings(make, tmp_path):
    """12 prompts a batch, 5 batches an epoch, graded after batches 3, 6, 9, ...: stopped just after a grading, between
    two, and at the end of an epoch."""

    def fresh() -> PromptData:
        return make(strata=MEASURED, batch_size=12, seed=4)

    straight = run(fresh()).seen
    assert len(straight) == 15
    assert {name for _, names in straight[:3] for name in names} == {"medium"}
    assert {name for _, names in straight[9:] for name in names} == {"easy", "medium", "hard"}
    for step in (3, 5, 7):
        path = tmp_path / f"step-{step}"
        assert run(fresh(), [SaveAfter(step, path)]).seen == straight
        assert run(fresh(), resume=path).seen == straight[step:]


def test_overfit_batches_repeat_the_same_mixed_batches(make):
    seen = run(make(strata={}, batch_size=10), overfit_batches=2).seen
    assert seen[:2] == seen[2:4] == seen[4:]
    assert all(Counter(names) == {"easy": 7, "medium": 2, "hard": 1} for _, names in seen)


def test_another_ratio_is_noticed_on_resume(make):
    first, other = make(strata={}), make(strata={"ratio": {"easy": 1, "medium": 1, "hard": 1}})
    assert first.state_dict()["fingerprint"] is None  # nothing is read yet
    for data in (first, other):
        data.groups("train")
    with pytest.warns(UserWarning, match="The data differ from those"):
        other.load_state_dict(first.state_dict())


# ---------------------------------------------------------------------- dynamic sampling


def test_refills_are_of_the_stratum_new_and_the_same_everywhere(make):
    data = make(strata={}, seed=1)
    lacking, tried = {"easy": 3, "hard": 1}, set(range(0, 45))
    fresh = data.refill(step=7, attempt=1, lacking=lacking, exclude=tried)
    assert Counter(labels(fresh)) == lacking
    assert not tried & set(numbers(fresh))
    assert fresh == make(strata={}, seed=1).refill(step=7, attempt=1, lacking=lacking, exclude=tried)
    draws = {
        tuple(numbers(data.refill(step=s, attempt=a, lacking=lacking, exclude=tried))) for s in (7, 8) for a in (1, 2)
    }
    assert len(draws) > 1
    # of 5 easy prompts that are left no more than 5 can come
    assert len(data.refill(step=7, attempt=1, lacking={"easy": 9}, exclude=tried)) == 5
    assert len(make().refill(step=7, attempt=1, lacking={"": 4}, exclude=())) == 4


def roller(informative, log: list[list[int]]):
    """A rollout of 2 completions each, whose groups give a signal where `informative(index)`."""

    def roll(prompts: Sequence[Group], attempt: int) -> tuple[GroupBatch, Tensor]:
        log.append(numbers(prompts))
        groups = [Group(prompt=g.prompt, completions=[[5], [6]], columns=g.columns, index=g.index) for g in prompts]
        batch = GroupBatch.from_groups(groups)
        batch = batch.with_rows(reward=batch.group_index[batch.group_of].float())
        return batch, torch.tensor([informative(g.index) for g in prompts], dtype=torch.bool)

    return roll


def test_groups_without_a_signal_are_replaced_by_prompts_of_their_stratum(make):
    """Prompts below 30 never give a signal."""
    data, log = make(strata={}, batch_size=10, seed=1), []
    prompts = prompts_of(next(iter(data.train_dataloader())))
    filled = fill(prompts, roller(lambda i: i >= 30, log), data, step=0, attempts=20)
    assert Counter(strata_of(filled.batch)) == {"easy": 7, "medium": 2, "hard": 1}
    index = filled.batch.group_index.tolist()
    assert min(index) >= 30
    assert len(set(index)) == 10
    tried = [i for part in log for i in part]
    assert len(set(tried)) == len(tried) == filled.sampled
    assert filled.dropped == filled.sampled - 10
    assert filled.lacking == 0
    assert filled.batch.rows["reward"].tolist() == [float(i) for i in index for _ in range(2)]


def test_refilling_is_bounded(make):
    data, log = make(strata={}, batch_size=10, seed=1), []
    prompts = prompts_of(next(iter(data.train_dataloader())))
    filled = fill(prompts, roller(lambda i: False, log), data, step=0, attempts=2)
    assert [len(part) for part in log] == [10, 10, 9]  # of the 20 easy prompts 6 are left for the last 7 places
    assert (filled.batch.num_prompts, filled.sampled, filled.dropped, filled.lacking) == (0, 29, 29, 10)
    filled = fill(prompts, roller(lambda i: False, log), data, step=0, attempts=50)
    assert filled.sampled <= 60
    assert filled.lacking == 10
    dropped = fill(prompts, roller(lambda i: i % 2 == 0, []), data, step=0, attempts=0)
    assert dropped.batch.num_prompts + dropped.lacking == 10


def two_ranks(monkeypatch: pytest.MonkeyPatch, rank: int, parts: list[Any]) -> None:
    """As one of two ranks that gather these parts."""
    monkeypatch.setattr(distributed, "all_gather_objects", lambda value: parts)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)


def test_minibatches_of_two_ranks_go_by_the_seats_of_their_groups(monkeypatch):
    """Of four prompts the first is dropped: rank 0 holds seat 2, rank 1 seats 1 and 3. The minibatches of one process
    would be seat 1, and seats 2 and 3; taking from each rank in turn would begin with seat 2."""
    seats = [[2], [1, 3]]
    expected = [[[], [2]], [[1], [3]]]
    for rank, mine in enumerate(seats):
        batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[4], [5]], index=s) for s in mine])
        batch = batch.with_rows(seat=torch.tensor(mine, dtype=torch.float64)[batch.group_of])
        two_ranks(monkeypatch, rank, seats)
        assert [part.group_index.tolist() for part in minibatches(batch, 2)] == expected[rank]


def test_a_prompt_that_two_ranks_hold_is_counted_over_both(monkeypatch):
    """The batch of all ranks is 7, 7, 8, 7, 9; 7 stands before itself 0, 1 and 2 times."""
    parts = [["7", "8", "9"], ["7", "7"]]
    for rank, (mine, expected) in enumerate([([7, 8, 9], [0, 0, 0]), ([7, 7], [1, 2])]):
        two_ranks(monkeypatch, rank, parts)
        assert times_before([Group(prompt=[1], completions=(), index=i) for i in mine]) == expected


def test_concatenated_batches_are_the_batch_of_all_groups():
    groups = [
        Group(prompt=[1] * (i + 1), completions=[[5] * i, [6, 7]], rows={"r": [i, -i]}, columns={"c": i}, index=i)
        for i in range(4)
    ]
    parts = [GroupBatch.from_groups(part) for part in (groups[:1], [], groups[1:])]
    together, expected = concatenate(parts), GroupBatch.from_groups(groups)
    for name in ("prompt_ids", "completion_ids", "completion_lengths", "group_of", "scored", "weights", "group_index"):
        assert torch.equal(getattr(together, name), getattr(expected, name)), name
    assert torch.equal(together.rows["r"], expected.rows["r"])
    assert together.columns == expected.columns
    assert concatenate([parts[1], parts[1]]).num_prompts == 0
