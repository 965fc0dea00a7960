"""Batches of a moving mix and a growing set of rows, by counting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment.errors import UserError
from alignment.schedulable import Schedulable, Schedulables
from alignment.tiny import tiny_tokenizer
from datamodules import PreferenceData, PromptData, SupervisedData
from datamodules.planned import Draws, MixConfig


def values(fraction: float = 1.0, **shares: float) -> Schedulables:
    found = Schedulables()
    found.register(Schedulable("data.fraction", fraction))
    for name, share in shares.items():
        found.register(Schedulable(f"data.mix.{name}", share))
    return found


def draws(n: int, known: Schedulables | None = None, **settings: Any) -> Draws:
    return Draws(np.zeros(n, dtype=np.int64), [], known or values(), seed=0, **settings)


def test_all_rows_in_use_are_a_shuffle_without_replacement() -> None:
    found = draws(10)
    first = [row for _ in range(5) for row in found.batch(2)]
    second = [row for _ in range(5) for row in found.batch(2)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != sorted(first)
    other = Draws(np.zeros(10, dtype=np.int64), [], values(), seed=1)
    assert [row for _ in range(5) for row in other.batch(2)] != first


def test_without_shuffle_rows_come_in_their_order() -> None:
    found = draws(5, shuffle=False)
    assert [found.batch(3) for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_a_batch_may_need_more_than_there_is() -> None:
    assert sorted(draws(2).batch(5)) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_a_curriculum_takes_the_highest_confidence_first() -> None:
    """Ten rows, confidence 0 to 9: at .3 the rows 7, 8, 9; then one row more each batch, which is new and comes at
    once, beside the least often given."""
    known = values(0.3)
    found = draws(10, known)
    found.freeze(np.arange(10.0))
    assert sorted(found.batch(3)) == [7, 8, 9]
    known["data.fraction"].write(0.31)  # 3.1 rows: 4
    assert sorted(found.batch(1)) == [6]
    known["data.fraction"].write(0.6)
    assert sorted(found.batch(2)) == [4, 5]
    assert set(found.batch(6)) == {4, 5, 6, 7, 8, 9}
    known["data.fraction"].write(1.0)
    assert sorted(found.batch(4)) == [0, 1, 2, 3]


def test_what_comes_first_is_shuffled() -> None:
    found = draws(100, values(0.5))
    found.freeze(np.arange(100.0))
    rows = [row for _ in range(10) for row in found.batch(5)]
    assert sorted(rows) == list(range(50, 100))
    assert rows not in (sorted(rows), sorted(rows, reverse=True))


def test_unknown_confidence_is_last_and_equal_ones_keep_their_order() -> None:
    found = draws(4, values(0.5))
    found.freeze(np.array([np.nan, 1.0, 1.0, 1.0]))
    assert sorted(found.in_use(0)) == [1, 2]


def test_the_mix_of_each_batch_is_exact() -> None:
    """7:2:1 in batches of 10; then 1:1:0 in batches of 4."""
    known = values(easy=7, medium=2, hard=1)
    labels = np.repeat([0, 1, 2], 20)
    found = Draws(labels, ["easy", "medium", "hard"], known, seed=0)
    assert np.bincount(labels[found.batch(10)], minlength=3).tolist() == [7, 2, 1]
    for name, share in (("easy", 1.0), ("medium", 1.0), ("hard", 0.0)):
        known[f"data.mix.{name}"].write(share)
    for _ in range(3):
        assert np.bincount(labels[found.batch(4)], minlength=3).tolist() == [2, 2, 0]


def test_a_fraction_is_of_each_stratum() -> None:
    known = values(0.5, a=1, b=1)
    labels = np.array([0] * 4 + [1] * 4)
    found = Draws(labels, ["a", "b"], known, seed=0)
    found.freeze(np.arange(8.0))
    assert sorted(found.batch(4)) == [2, 3, 6, 7]


def test_an_empty_stratum_leaves_its_seats_to_the_others() -> None:
    found = Draws(np.zeros(4, dtype=np.int64), ["a", "b"], values(a=1, b=9), seed=0)
    assert sorted(found.batch(4)) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="the mix gives no share to any of a, b that has training rows"):
        Draws(np.zeros(4, dtype=np.int64), ["a", "b"], values(a=0, b=9), seed=0).batch(1)


def test_state_and_put_back() -> None:
    """From every batch: a copy that loads the state goes on alike, also when the last batch was put back."""
    known = values(0.7, a=1, b=2)
    labels = np.arange(30) % 2

    def fresh() -> Draws:
        return Draws(labels, ["a", "b"], known, seed=3)

    whole = fresh()
    whole.freeze(np.sin(np.arange(30.0)))
    states, batches = [whole.state_dict()], []
    for _ in range(12):
        batches.append(whole.batch(5))
        states.append(whole.state_dict())
    for start, state in enumerate(states):
        again = fresh()
        again.load_state_dict(state)
        assert [again.batch(5) for _ in range(12 - start)] == batches[start:]
    again = fresh()
    again.load_state_dict(states[4])
    again.batch(5)
    again.put_back()
    assert again.batch(5) == batches[4]
    with pytest.raises(UserError, match="holds the order of 30 training rows, the data have 4"):
        draws(4).load_state_dict(states[0])


# ---------------------------------------------------------------------- data modules

SOURCES = ["chat", "code", "math"]


def rows(folder: Path, count: int = 24, kind: str = "pairs", first: int = 0, **more: Any) -> str:
    path = folder / f"{kind}{first or ''}.jsonl"
    lines = []
    for i in range(first, first + count):
        row: dict[str, Any] = {"prompt": f"Say {i}.", "source": SOURCES[i % 3]}
        if kind == "pairs":
            row |= {"chosen": f"It is {i}.", "rejected": f"No {i}.", "margin": float(i)}
        elif kind == "answers":
            row |= {"completion": f"It is {i}."}
        lines.append(json.dumps(row | {name: value(i) for name, value in more.items()}))
    path.write_text("\n".join(lines))
    return str(path)


SMALL: dict[str, Any] = {"cache_dir": None, "val_fraction": 0.0, "batch_size": 6}


KINDS = [("pairs", PreferenceData), ("answers", SupervisedData), ("prompts", PromptData)]


@pytest.mark.parametrize(("kind", "module"), KINDS)
def test_a_fixed_mix_by_a_column(kind: str, module: Any, tmp_path: Path) -> None:
    """3:2:1 in every batch, whatever the module."""
    mix = {"column": "source", "ratio": {"chat": 3, "code": 2, "math": 1}}
    data = module(rows(tmp_path, kind=kind), mix=mix, tokenizer=tiny_tokenizer(), **SMALL)
    loader = data.train_dataloader()
    found = [[columns["source"] for columns in batch.columns] for batch in loader]
    assert len(found) == 4
    assert all([batch.count(name) for name in SOURCES] == [3, 2, 1] for batch in found)


def test_a_moving_mix_and_curriculum(tmp_path: Path) -> None:
    mix = {"column": "source", "ratio": {"chat": 1, "code": 1, "math": 1}}
    data = PreferenceData(rows(tmp_path), mix=mix, tokenizer=tiny_tokenizer(), **SMALL)
    data.plan()
    data.draws.freeze(data.groups("train").values("margin"))
    data.schedulables["data.fraction"].write(0.5)
    batches = iter(data.train_dataloader())
    first = next(batches)
    assert [columns["source"] for columns in first.columns].count("chat") == 2
    assert min(first.rows["margin"]) >= 12
    data.schedulables["data.mix.chat"].write(0.0)
    second = next(batches)
    assert [columns["source"] for columns in second.columns].count("chat") == 0


def test_a_data_module_goes_on_where_it_stood(tmp_path: Path) -> None:
    def made() -> Any:
        data = PreferenceData(rows(tmp_path), tokenizer=tiny_tokenizer(), **SMALL)
        data.plan()
        return data

    whole = made()
    loader = whole.train_dataloader()
    batches, states = [], []
    for epoch in range(2):
        loader.batch_sampler.sampler.set_epoch(epoch)
        for batch in loader:
            batches.append(batch.group_index.tolist())
            states.append((whole.state_dict(), loader.state_dict()))
    assert sorted(row for batch in batches[:4] for row in batch) == list(range(24))
    for start in (1, 4, 6):
        again = made()
        state, place = states[start - 1]
        again.load_state_dict(state)
        other = again.train_dataloader()
        other.load_state_dict(place)
        found = [batch.group_index.tolist() for batch in other]
        if start < 4:
            other.batch_sampler.sampler.set_epoch(1)
            found += [batch.group_index.tolist() for batch in other]
        assert found == batches[start:]


def test_a_dropped_batch_comes_again(tmp_path: Path) -> None:
    data = PreferenceData(rows(tmp_path), tokenizer=tiny_tokenizer(), **SMALL)
    data.plan()
    loader = data.train_dataloader()
    batches = iter(loader)
    next(batches)
    dropped = next(batches)
    loader.put_back()
    state, place = data.state_dict(), loader.state_dict()
    again = PreferenceData(rows(tmp_path), tokenizer=tiny_tokenizer(), **SMALL)
    again.plan()
    again.load_state_dict(state)
    other = again.train_dataloader()
    other.load_state_dict(place)
    assert next(iter(other)).group_index.tolist() == dropped.group_index.tolist()


def test_strata_of_prompts_move_too(tmp_path: Path) -> None:
    strata = {"by": "column", "column": "source", "ratio": {"chat": 1, "code": 0, "math": 0}}
    data = PromptData(rows(tmp_path, kind="prompts"), strata=strata, tokenizer=tiny_tokenizer(), **SMALL)
    data.plan()
    batches = iter(data.train_dataloader())
    assert {columns["difficulty"] for columns in next(batches).columns} == {"chat"}
    data.schedulables["data.mix.chat"].write(0.0)
    data.schedulables["data.mix.math"].write(2.0)
    assert {columns["difficulty"] for columns in next(batches).columns} == {"math"}


def test_refills_stay_within_the_curriculum(tmp_path: Path) -> None:
    data = PromptData(rows(tmp_path, kind="prompts"), tokenizer=tiny_tokenizer(), **SMALL)
    data.plan()
    data.draws.freeze(np.arange(24.0))
    data.schedulables["data.fraction"].write(0.25)
    found = data.refill(step=0, attempt=1, lacking={"": 24}, exclude=set())
    assert sorted(group.index for group in found) == list(range(18, 24))


def test_without_a_plan_nothing_is_saved(tmp_path: Path) -> None:
    data = PreferenceData(rows(tmp_path), tokenizer=tiny_tokenizer(), **SMALL)
    assert set(data.state_dict()) == {"fingerprint"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 2}, "set num_workers to 0"),
        ({"length_aware": True}, "length_aware: true would undo"),
        ({"mix": {"column": "source", "ratio": {"chat": 1}, "exhausted": "stop"}}, "exhausted: stop needs a mix"),
    ],
)
def test_settings_under_which_nothing_can_move(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        PreferenceData(rows(tmp_path), tokenizer=tiny_tokenizer(), **(SMALL | settings)).plan()


def test_strata_in_an_order_of_their_own_cannot_move(tmp_path: Path) -> None:
    strata = {"by": "length", "order": "curriculum"}
    with pytest.raises(UserError, match=r"strata\.order is curriculum"):
        PromptData(rows(tmp_path, kind="prompts"), strata=strata, tokenizer=tiny_tokenizer(), **SMALL).plan()


def test_mixes_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mix\.ratio is empty"):
        MixConfig(column="source", ratio={})
    for ratio, said in (
        ({"chat": 1, "code": 1}, "holds 'math', which has no share"),
        ({"chat": 1, "code": 1, "math": 1, "law": 1}, "no training row has 'law'"),
    ):
        mix = {"column": "source", "ratio": ratio}
        with pytest.raises(UserError, match=said):
            PreferenceData(rows(tmp_path), mix=mix, tokenizer=tiny_tokenizer(), **SMALL).train_dataloader()
    with pytest.raises(UserError, match="strata and mix would both decide"):
        PromptData("x.jsonl", strata={"by": "length"}, mix={"column": "source", "ratio": {"a": 1}})
    with pytest.raises(UserError, match="length_aware: true would undo the mix"):
        PreferenceData("x.jsonl", mix={"column": "source", "ratio": {"a": 1}}, length_aware=True)
