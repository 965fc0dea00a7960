"""Exact mixes of difficulties: [G-MIX], carry, streams; order, resume and elasticity (C21); grading by success."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.batches import Group
from alignment.errors import UserError
from datamodules.grading import Grades, Regrading
from datamodules.loader import SampleOrder, StatefulLoader
from datamodules.strata import CurriculumOrder, DifficultyStratifiedBatchSampler, Quota, Stream, spread

RATIO = (7, 2, 1)
# 50 prompts: 20 easy, 20 medium, 10 hard, scattered
LABELS = [(0, 1, 2, 0, 1)[i % 5] for i in range(50)]

# ---------------------------------------------------------------------- seats


@pytest.mark.parametrize(
    ("size", "seats"),
    [
        (1, [1, 0, 0]),
        (4, [3, 1, 0]),
        (8, [6, 1, 1]),
        (10, [7, 2, 1]),
        (16, [11, 3, 2]),
        (32, [23, 6, 3]),
        (64, [45, 13, 6]),
        (100, [70, 20, 10]),
    ],
)
def test_golden_mix(size: int, seats: list[int]) -> None:
    assert Quota(RATIO).seats(size) == seats
    assert Quota([0.7, 0.2, 0.1]).seats(size) == seats


def test_the_remainder_is_carried_so_that_batches_of_one_see_every_stratum() -> None:
    """By hand: after each seat the shares .7, .2, .1 are added; the largest takes the seat, the easier one in a tie."""
    quota = Quota(RATIO)
    seats = [quota.seats(1).index(1) for _ in range(20)]
    assert seats[:10] == [0, 0, 1, 0, 0, 2, 0, 0, 1, 0]
    assert seats[10:] == seats[:10]
    assert quota.carry == [0, 0, 0]


def test_two_hundred_rows_are_140_40_and_20() -> None:
    quota = Quota(RATIO)
    total = np.sum([quota.seats(16) for _ in range(12)] + [quota.seats(8)], axis=0)
    assert total.tolist() == [140, 40, 20]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any), st.lists(st.integers(1, 40), max_size=20))
def test_seats_never_stray_a_whole_seat_from_their_share(ratio: list[int], sizes: list[int]) -> None:
    quota, given_so_far = Quota(ratio), [0] * len(ratio)
    for n, size in enumerate(sizes, start=1):
        seats = quota.seats(size)
        assert sum(seats) == size
        assert min(seats) >= 0
        given_so_far = [a + b for a, b in zip(given_so_far, seats, strict=True)]
        due = [Fraction(r * sum(sizes[:n]), sum(ratio)) for r in ratio]
        assert [d - g for d, g in zip(due, given_so_far, strict=True)] == quota.carry
        assert sum(quota.carry) == 0
        if len(ratio) <= 3:
            assert max(abs(c) for c in quota.carry) < 1
        assert all(s == 0 for s, r in zip(seats, ratio, strict=True) if r == 0)


def test_ratios_that_are_none() -> None:
    for ratio in ([], [0, 0], [1, -1], [1, float("nan")], [float("inf"), 1]):
        with pytest.raises(UserError, match="needs numbers of at least 0 that are not all 0"):
            Quota(ratio)


def test_a_batch_is_mixed_evenly() -> None:
    """Halves and every second seat have the mix too: mini-batches and ranks are cut so."""
    batch = spread([[0] * 14, [1] * 4, [2] * 2])
    assert Counter(batch[:10]) == Counter(batch[10:]) == Counter({0: 7, 1: 2, 2: 1})
    assert sorted(spread([["a"], [], ["b", "c"]])) == ["a", "b", "c"]  # type: ignore[list-item]


# ---------------------------------------------------------------------- streams


def test_every_pass_of_a_stream_is_another_order_of_the_whole_stratum() -> None:
    stream = Stream(range(10), seed=1, keys=(0, 0))
    passes = [stream.take(10) for _ in range(3)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    again = Stream(range(10), seed=1, keys=(0, 0))
    assert again.take(7) + again.take(3) == passes[0]
    assert Stream(range(10), seed=2, keys=(0, 0)).take(10) != passes[0]
    assert Stream([4, 2, 9], seed=1, keys=(0, 0), shuffle=False).take(5) == [4, 2, 9, 4, 2]


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_no_batch_holds_a_prompt_twice_where_a_pass_ends_inside_it(count: int) -> None:
    stream = Stream(range(7), seed=3, keys=(0, 0))
    taken = [stream.take(count) for _ in range(28)]
    assert all(len(set(batch)) == count for batch in taken)
    seen = list(itertools.chain(*taken))
    assert all(sorted(seen[i : i + 7]) == list(range(7)) for i in range(0, 28 * count, 7))


def test_a_stratum_smaller_than_its_seats_repeats_prompts_as_little_as_it_can() -> None:
    counts = Counter(Stream(range(3), seed=0, keys=()).take(7))
    assert sorted(counts.values()) == [2, 2, 3]


# ---------------------------------------------------------------------- batches


def make(batch_size=10, *, rank=0, ranks=1, labels=LABELS, grades=None, seed=5, shuffle=True, **settings):  # type: ignore[no-untyped-def]
    grades = Grades(labels) if grades is None else grades
    sampler = SampleOrder(len(grades.labels), seed=seed, shuffle=shuffle)
    order = DifficultyStratifiedBatchSampler(
        sampler, grades, batch_size=batch_size, rank=rank, world_size=ranks, **{"ratio": RATIO, **settings}
    )
    data = [Group(prompt=[1], completions=(), index=i) for i in range(len(grades.labels))]
    return StatefulLoader(data, order)


def epoch_of(loader: StatefulLoader, epoch: int) -> list[list[int]]:
    loader.batch_sampler.sampler.set_epoch(epoch)
    return [batch.group_index.tolist() for batch in loader]


def mix(batch: list[int], labels: list[int] = LABELS) -> list[int]:
    return [sum(labels[i] == k for i in batch) for k in range(3)]


def test_every_batch_has_the_exact_mix_and_strata_are_used_evenly() -> None:
    loader = make()
    batches = [b for epoch in range(8) for b in epoch_of(loader, epoch)]
    assert len(batches) == 8 * 5
    assert all(mix(b) == [7, 2, 1] for b in batches)
    assert all(len(set(b)) == 10 for b in batches)
    used = Counter(itertools.chain(*batches))
    # 280 easy seats for 20 prompts, 80 medium ones for 20, 40 hard ones for 10
    assert {used[i] for i in range(50) if LABELS[i] == 0} == {14}
    assert {used[i] for i in range(50) if LABELS[i] == 1} == {4}
    assert {used[i] for i in range(50) if LABELS[i] == 2} == {4}


def test_the_remainder_is_carried_over_the_end_of_an_epoch() -> None:
    """12 seats an epoch, 3 epochs: 36 seats hold 25.2, 7.2 and 3.6 of the strata."""
    labels = [0] * 4 + [1] * 4 + [2] * 4
    loader = make(4, labels=labels)
    total = np.sum([mix(b, labels) for epoch in range(3) for b in epoch_of(loader, epoch)], axis=0)
    assert total.tolist() == [25, 7, 4]


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_ranks_share_each_batch(ranks: int) -> None:
    whole = epoch_of(make(), 2)
    shares = [epoch_of(make(rank=r, ranks=ranks), 2) for r in range(ranks)]
    for b, batch in enumerate(whole):
        dealt = itertools.zip_longest(*[share[b] for share in shares])
        assert [i for i in itertools.chain(*dealt) if i is not None] == batch


@pytest.mark.parametrize("stop", [0, 1, 2, 4, 5])
def test_resumed_equals_uninterrupted(stop: int) -> None:
    straight = [epoch_of(make(), e) for e in (1, 2)]
    loader = make()
    loader.batch_sampler.sampler.set_epoch(1)
    iterator = iter(loader)
    seen = [next(iterator).group_index.tolist() for _ in range(stop)]
    later = make()
    if stop:
        later.load_state_dict(loader.state_dict())
    else:
        later.batch_sampler.sampler.set_epoch(1)
    seen += [b.group_index.tolist() for b in later] if stop < 5 else []
    assert seen == straight[0]
    assert epoch_of(later, 2) == straight[1]


def test_two_one_two_processes_see_the_same_samples() -> None:
    straight = epoch_of(make(), 1)
    seen: list[list[int]] = []
    state = {"epoch": 1, "batches": 0, "batch_size": 10, "size": 50, "seed": 5}
    for ranks, count in ((2, 2), (1, 2), (2, 1)):
        loaders = [make(rank=r, ranks=ranks) for r in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(count):
            seen.append(sorted(i for it in iterators for i in next(it).group_index.tolist()))
        state = loaders[0].state_dict()
    assert seen == [sorted(b) for b in straight]


def test_order_depends_on_seed_and_epoch_and_stays_without_shuffling() -> None:
    assert epoch_of(make(), 0) == epoch_of(make(), 0)
    assert epoch_of(make(seed=6), 0) != epoch_of(make(), 0)
    assert epoch_of(make(), 1) != epoch_of(make(), 0)
    fixed = make(shuffle=False)
    assert epoch_of(fixed, 3) == epoch_of(fixed, 0)
    assert epoch_of(fixed, 0)[0] == [0, 3, 1, 5, 8, 2, 10, 13, 4, 15]


def test_stop_ends_the_epoch_before_a_stratum_repeats() -> None:
    """20 easy prompts at 7 a batch: two batches, then an epoch that draws anew."""
    loader = make(exhausted="stop")
    assert len(loader) == 2
    epochs = [epoch_of(loader, e) for e in (0, 1)]
    for batches in epochs:
        assert [mix(b) for b in batches] == [[7, 2, 1]] * 2
        assert len(set(itertools.chain(*batches))) == 20
    assert epochs[0] != epochs[1]
    later = make(exhausted="stop")
    later.load_state_dict({"epoch": 1, "batches": 1, "batch_size": 10, "size": 50, "seed": 5})
    assert [b.group_index.tolist() for b in later] == epochs[1][1:]


def test_a_stratum_without_prompts_leaves_its_seats_to_the_others() -> None:
    labels = [0] * 30 + [1] * 30
    batches = epoch_of(make(9, labels=labels), 0)
    assert all(mix(b, labels) == [7, 2, 0] for b in batches)


def test_the_last_batch_is_full_or_left_out() -> None:
    assert [len(b) for b in epoch_of(make(20), 0)] == [20, 20, 20]
    assert [len(b) for b in epoch_of(make(20, drop_last=True), 0)] == [20, 20]


def test_settings_that_make_no_sense(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="exhausted is 'loop'; use reshuffle or stop"):
        make(exhausted="loop")
    with pytest.raises(
        ValueError, match="50 prompts in 2 strata do not fit labels of 50 prompts, the largest of them 2"
    ):
        make(ratio=(1, 1))
    with pytest.raises(UserError, match="exhausted: stop needs strata that stay"):
        make(grades=Grades(LABELS, regrading()), exhausted="stop")
    with pytest.raises(UserError, match=r"strata of \[20, 20, 10\] prompts cannot fill a batch of 30"):
        make(30, exhausted="stop")
    with caplog.at_level(logging.WARNING):
        make(200)
    assert "stratum 2 has 10 prompts for up to 20 seats of a batch" in caplog.text


def test_curriculum_goes_from_easy_to_hard_in_every_epoch() -> None:
    order = CurriculumOrder(np.array(LABELS), seed=1)
    first = order.order().tolist()
    assert [LABELS[i] for i in first] == sorted(LABELS)
    assert sorted(first) == list(range(50))
    order.set_epoch(1)
    second = order.order().tolist()
    assert second != first
    assert [LABELS[i] for i in second] == sorted(LABELS)
    assert CurriculumOrder(np.array([1, 0, 1, 0]), shuffle=False).order().tolist() == [1, 3, 0, 2]


# ---------------------------------------------------------------------- grading


def regrading(every=1, rollouts=4):  # type: ignore[no-untyped-def]
    return Regrading(every=every, rollouts=rollouts, rates=(0.7, 0.3), margin=0.05)


def grade(label: int, rate: float) -> int:
    return int(regrading().grade(np.array([label]), np.array([rate]))[0])


def test_grades_move_when_a_rate_is_clearly_crossed() -> None:
    """Easy from 0.7, hard below 0.3, with a margin of 0.05 on both sides."""
    assert [grade(1, r) for r in (0.76, 0.74, 0.66, 0.34, 0.26, 0.24)] == [0, 1, 1, 1, 1, 2]
    assert [grade(0, r) for r in (0.74, 0.66, 0.64, 0.26, 0.24)] == [0, 0, 1, 1, 2]
    assert [grade(2, r) for r in (0.26, 0.34, 0.36, 0.74, 0.76)] == [2, 2, 1, 1, 0]


def test_a_prompt_is_graded_once_it_has_enough_rollouts() -> None:
    grades = Grades([1, 1, 1], regrading(every=2, rollouts=4))
    observe(grades, [(0, 2, 2), (1, 0, 3)])
    assert (grades.labels.tolist(), grades.version) == ([1, 1, 1], 0)
    observe(grades, [(0, 2, 2)])  # the second batch: prompt 0 has 4 of 4, prompt 1 only 3 rollouts
    assert (grades.labels.tolist(), grades.version) == ([0, 1, 1], 1)
    observe(grades, [(1, 0, 1)])
    observe(grades, [(0, 0, 3)])  # the counts of prompt 0 began anew: 3 are not enough
    assert (grades.labels.tolist(), grades.version) == ([0, 2, 1], 2)
    observe(grades, [])
    observe(grades, [])
    assert grades.version == 2


def observe(grades: Grades, seen: list[tuple[int, float, int]]) -> None:
    positions, successes, trials = zip(*seen, strict=True) if seen else ((), (), ())
    grades.observe(np.array(positions, dtype=np.int64), np.array(successes, dtype=float), np.array(trials, dtype=int))


def test_gradings_that_make_no_sense() -> None:
    with pytest.raises(UserError, match="rates must fall"):
        Regrading(every=1, rollouts=1, rates=(0.3, 0.7), margin=0.05)
    with pytest.raises(UserError, match="rates must fall"):
        Regrading(every=1, rollouts=1, rates=(0.5, 0.45), margin=0.05)
    with pytest.raises(UserError, match="got 0, 1 and 0"):
        Regrading(every=0, rollouts=1, rates=(0.5,), margin=0)
    with pytest.raises(UserError, match="grades of 2 prompts, the data have 3"):
        Grades([0, 0, 0], regrading()).load_state_dict(Grades([0, 0], regrading()).state_dict())


class Run:
    """A run that measures success by a fixed rule, so that its grades move, and that can stop and go on."""

    def __init__(self, batch_size: int, every: int, state: tuple[dict, dict] | None = None) -> None:  # type: ignore[type-arg]
        self.grades = Grades([1] * 50, regrading(every=every))
        self.loader = make(batch_size, grades=self.grades)
        if state is not None:
            self.grades.load_state_dict(state[0])
            self.loader.load_state_dict(state[1])
        self.mixes: list[list[int]] = []

    def batches(self, count: int) -> list[list[int]]:
        out: list[list[int]] = []
        while len(out) < count:
            for batch in self.loader:
                ids = batch.group_index.tolist()
                out.append(ids)
                self.mixes.append(mix(ids, self.grades.labels.tolist()))
                # prompts that 5 divides are never solved, other odd ones always, the rest in half of the tries
                observe(self.grades, [(i, 0 if i % 5 == 0 else 2 + 2 * (i % 2), 4) for i in ids])
                if len(out) == count:
                    return out
            self.loader.batch_sampler.sampler.set_epoch(self.loader.batch_sampler.sampler.epoch + 1)
        return out

    def state(self) -> tuple[dict, dict]:  # type: ignore[type-arg]
        return self.grades.state_dict(), self.loader.state_dict()


@pytest.mark.parametrize(("batch_size", "every"), [(10, 2), (1, 3), (7, 1)])
def test_c21_resumed_equals_uninterrupted_across_gradings(batch_size: int, every: int) -> None:
    """Stopped after every single batch, among them those right after a grading and at the end of an epoch."""
    straight = Run(batch_size, every)
    batches = straight.batches(16)
    assert straight.grades.version >= 3
    seen: list[list[int]] = []
    state = None
    for _ in range(16):
        run = Run(batch_size, every, state)
        seen += run.batches(1)
        state = run.state()
    assert seen == batches


def test_after_a_grading_batches_have_the_mix_of_the_new_grades() -> None:
    run = Run(10, 5)
    run.batches(15)
    assert run.mixes[:5] == [[0, 10, 0]] * 5  # all prompts begin in the middle and take every seat
    assert run.mixes[5:] == [[7, 2, 1]] * 10


def test_small_batches_see_hard_prompts_though_they_are_graded_often() -> None:
    """Batches of 1 and a grading after every one: without the carry all seats would be easy."""
    grades = Grades([0] * 20 + [1] * 20 + [2] * 20, regrading())
    loader, seats = make(1, grades=grades), []
    for n, batch in enumerate(loader):
        (i,) = batch.group_index.tolist()
        seats.append(int(grades.labels[i]))
        # the last prompt of each stratum goes to and fro, so that the grades change every time
        moving = [19, 59][n % 2]
        observe(grades, [(moving, 4 * (grades.labels[moving] != 0), 4)])
        if n == 19:
            break
    assert grades.version >= 10
    assert Counter(seats) == Counter({0: 14, 1: 4, 2: 2})
