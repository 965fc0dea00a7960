"""Keyed randomness: a draw depends on what it is for, never on what was drawn before."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from alignment import randomness
from alignment.batches import Group
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader


def test_a_key_is_one_number_between_0_and_2_to_the_63():
    values = [randomness.derive(seed, "order", key) for seed in range(20) for key in range(20)]
    assert len(set(values)) == 400
    assert all(0 <= v < 2**63 for v in values)


@pytest.mark.parametrize(
    "other", [(1, "order", 0), (0, "sampling", 0), (0, "order", 1), (0, "order", 0, 0), (0, "order"), (0, "order0")]
)
def test_each_part_of_the_key_counts(other):
    assert randomness.derive(*other) != randomness.derive(0, "order", 0)


def test_keys_are_not_run_together():
    assert randomness.derive(0, "a", 1, 23) != randomness.derive(0, "a", 12, 3)


def test_a_permutation_is_one_and_changes_with_the_epoch():
    first, second = randomness.permutation(3, 0, 50), randomness.permutation(3, 1, 50)
    assert sorted(first.tolist()) == list(range(50))
    assert first.tolist() != second.tolist()
    assert randomness.permutation(3, 0, 0).tolist() == []


def test_other_draws_do_not_matter():
    torch.manual_seed(0)
    first = torch.rand(3, generator=randomness.generator(5, "sampling", 2))
    state = torch.get_rng_state()
    torch.rand(100)
    assert torch.equal(torch.rand(3, generator=randomness.generator(5, "sampling", 2)), first)
    torch.manual_seed(0)
    randomness.permutation(1, 1, 10)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_process_draws_the_same():
    code = "from alignment import randomness as r; print(r.derive(7, 'x', 1), r.permutation(7, 1, 9).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{randomness.derive(7, 'x', 1)} {randomness.permutation(7, 1, 9).tolist()}"


def loader(rank: int, world_size: int) -> StatefulLoader:
    groups = [Group(prompt=[1], completions=[[2]], index=i) for i in range(22)]
    order = BatchOrder(SampleOrder(22, seed=1), batch_size=4, rank=rank, world_size=world_size)
    return StatefulLoader(groups, order)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 1), (3, 4, 1)])
def test_elastic_runs_see_the_same_samples(sizes):
    """R15: processes change at batches 2 and 4 of an epoch; every batch holds the samples it always held."""
    expected = [batch.group_index.tolist() for batch in loader(0, 1)]
    seen: list[list[int]] = []
    state = None
    for world_size, count in zip(sizes, (2, 2, 2), strict=True):
        loaders = [loader(rank, world_size) for rank in range(world_size)]
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        parts = [list(itertools.islice(iter(each), count)) for each in loaders]
        state = loaders[0].state_dict()
        assert all(each.state_dict() == state for each in loaders)
        for shares in zip(*parts, strict=True):
            merged: list[int] = [0] * sum(len(s) for s in shares)
            for rank, share in enumerate(shares):
                merged[rank::world_size] = share.group_index.tolist()
            seen.append(merged)
    assert seen == expected
