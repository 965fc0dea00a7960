"""The share of 4-grams that a completion repeats."""

from __future__ import annotations

import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.experience import completion_metrics, repetition


def batch(*completions: list[int]) -> GroupBatch:
    return GroupBatch.from_groups(
        [Group(prompt=[1], completions=[list(ids)], index=i) for i, ids in enumerate(completions)]
    )


def test_by_hand() -> None:
    """Three 4-grams of one kind: 2/3. Two kinds: 0. 1234 comes twice among five: 1/5. One 4-gram: nothing to repeat.
    That two completions share their 4-grams is no repetition."""
    share, known = repetition(
        batch([7] * 6, [1, 2, 3, 4, 5], [1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], [8])
    )
    assert share.tolist() == pytest.approx([2 / 3, 0, 1 / 5, 0, 0, 0])
    assert known.tolist() == [True, True, True, False, True, False]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_as_sets_of_tuples_count_it(n: int) -> None:
    draw = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 30, (50,), generator=draw).tolist()
    texts = [torch.randint(4, 8, (length,), generator=draw).tolist() for length in lengths]
    expected = []
    for ids in texts:
        grams = list(zip(*(ids[i:] for i in range(n)), strict=False))
        expected.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    share, known = repetition(batch(*texts), n)
    assert share.tolist() == pytest.approx(expected)
    assert known.tolist() == [len(ids) > n for ids in texts]


def test_the_metric_is_the_mean_over_those_that_have_two() -> None:
    rows = batch([7] * 6, [1, 2, 3, 4, 5], [9])
    total, count = completion_metrics(rows.with_rows(truncated=torch.zeros(3)))["completions/repetition"]
    assert float(total / count) == pytest.approx(1 / 3)
    short = batch([9], [8]).with_rows(truncated=torch.zeros(2))
    assert float(completion_metrics(short)["completions/repetition"][1]) == 0
