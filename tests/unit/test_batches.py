"""GroupBatch: collation, cutting into micro-batches, reductions, the padded form (cases C3, C5, C6)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.batches import Group, GroupBatch

group_shapes = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=6
)


def numbered(shapes: list[tuple[int, list[int]]]) -> GroupBatch:
    """Every token id is unique within the batch, so that a token can be followed through any cut."""
    token = 0
    groups = []
    for index, (prompt, completions) in enumerate(shapes):
        rows = []
        for n in (prompt, *completions):
            rows.append(list(range(token, token + n)))
            token += n
        groups.append(Group(prompt=rows[0], completions=rows[1:], index=index))
    return GroupBatch.from_groups(groups)


def pieces(batch: GroupBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, completion ids) of every completion."""
    prompts = [tuple(p.tolist()) for p in batch.prompt_ids.split(batch.prompt_lengths.tolist())]
    rows = [tuple(c.tolist()) for c in batch.completion_ids.split(batch.completion_lengths.tolist())]
    return [(prompts[g], row) for g, row in zip(batch.group_of.tolist(), rows, strict=True)]


def test_collate_keeps_ids_lengths_and_groups():
    batch = GroupBatch.from_groups(
        [
            Group(prompt=[1, 2], completions=[[3], [4, 5]], index=7, rows={"margin": [0.5, 0.25]}),
            Group(prompt=[6], completions=[[8, 9, 10]], weights=[2.0], rows={"margin": [1.0]}),
        ]
    )
    assert batch.prompt_ids.tolist() == [1, 2, 6]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.completion_ids.tolist() == [3, 4, 5, 8, 9, 10]
    assert batch.completion_lengths.tolist() == [1, 2, 3]
    assert batch.group_of.tolist() == [0, 0, 1]
    assert batch.weights.tolist() == [1.0, 1.0, 2.0]
    assert batch.group_index.tolist() == [7, -1]
    assert batch.rows["margin"].tolist() == [0.5, 0.25, 1.0]
    assert batch.row_of().tolist() == [0, 1, 1, 2, 2, 2]
    assert batch.group_tokens().tolist() == [5, 4]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (Group(prompt=[], completions=[[1]], index=3), "row 3 has an empty prompt"),
        (Group(prompt=[1], completions=[[1, 2]], scored=[[True]], index=4), "row 4: 'scored' must have one value"),
        (Group(prompt=[1], completions=[[1]], weights=[1.0, 2.0], index=5), "row 5: 2 weights for 1 completions"),
        (Group(prompt=[1], completions=[[1]], rows={"m": []}, index=6), "row 6: 0 values of 'm' for 1 completions"),
    ],
)
def test_a_malformed_row_is_named(group, message):
    with pytest.raises(ValueError, match=message):
        GroupBatch.from_groups([group])


def test_a_value_that_some_rows_lack_is_named():
    groups = [Group(prompt=[1], completions=[[2]], rows={"m": [1.0]}), Group(prompt=[1], completions=[[2]], index=9)]
    with pytest.raises(ValueError, match="row 9 has no value 'm'"):
        GroupBatch.from_groups(groups)


def test_key_depends_on_content_and_on_where_it_is_cut():
    a = Group(prompt=[1, 2], completions=[[3], [4]], index=0)
    assert a.key == Group(prompt=[1, 2], completions=[[3], [4]], index=5).key
    assert a.key != Group(prompt=[1], completions=[[2, 3], [4]]).key
    assert a.key != Group(prompt=[1, 2], completions=[[4], [3]]).key


@settings(max_examples=60, deadline=None)
@given(shapes=group_shapes, bound=st.integers(1, 60))
def test_split_keeping_groups(shapes, bound):
    batch = numbered(shapes)
    parts = list(batch.split(bound))
    assert sorted(p for part in parts for p in pieces(part)) == sorted(pieces(batch))
    for part in parts:
        assert int(part.group_tokens().sum()) <= bound or part.num_prompts == 1
        assert len(set(part.group_index.tolist())) == part.num_prompts  # each prompt once
    assert sorted(i for part in parts for i in part.group_index.tolist()) == list(range(len(shapes)))


@settings(max_examples=60, deadline=None)
@given(shapes=group_shapes, bound=st.integers(1, 60))
def test_split_spreading_groups(shapes, bound):
    batch = numbered(shapes)
    parts = list(batch.split(bound, keep_groups=False))
    assert sorted(p for part in parts for p in pieces(part)) == sorted(pieces(batch))
    for part in parts:
        assert int(part.group_tokens().sum()) <= bound or part.num_completions == 1
        assert len(set(part.group_index.tolist())) == part.num_prompts


@settings(max_examples=40, deadline=None)
@given(shapes=group_shapes, data=st.data())
def test_select_carries_every_value_along(shapes, data):
    batch = numbered(shapes)
    row = torch.arange(batch.num_completions, dtype=torch.float32)
    batch = batch.with_rows(row=row).with_tokens(id=batch.completion_ids.float())
    chosen = data.draw(st.lists(st.sampled_from(range(len(shapes))), unique=True, min_size=1))
    part = batch.select_groups(chosen)
    assert part.group_index.tolist() == chosen
    assert torch.equal(part.tokens["id"], part.completion_ids.float())
    assert part.rows["row"].tolist() == [r for g in chosen for r in (batch.group_of == g).nonzero()[:, 0].tolist()]


def test_split_without_bound_and_of_nothing():
    batch = numbered([(3, [2, 2])])
    assert list(batch.split(None)) == [batch]
    assert list(GroupBatch.from_groups([]).split(8)) == []
    assert list(GroupBatch.from_groups([]).split(None)) == []


def test_pair():
    batch = numbered([(1, [2, 1]), (2, [3, 3])])
    chosen, rejected = batch.pair(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert chosen.tolist() == [1.0, 3.0]
    assert rejected.tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match="exactly two completions"):
        numbered([(1, [2, 1, 1]), (2, [3])]).pair(torch.zeros(4))


def test_sums_and_means_leave_unscored_tokens_out():
    batch = GroupBatch.from_groups(
        [Group(prompt=[1], completions=[[1, 2, 3], [], [4, 5]], scored=[[True, False, True], [], [False, False]])]
    )
    values = torch.tensor([1.0, 50.0, 2.0, 60.0, 70.0])
    assert batch.scored_lengths().tolist() == [2, 0, 0]
    assert batch.sum_tokens(values).tolist() == [3.0, 0.0, 0.0]
    assert batch.mean_tokens(values).tolist() == [1.5, 0.0, 0.0]


def test_c3_a_nan_at_an_unscored_token_reaches_neither_value_nor_gradient():
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[1, 2]], scored=[[True, False]])])
    old = torch.tensor([0.0, torch.nan])
    new = torch.tensor([0.5, 0.25], requires_grad=True)
    total = batch.sum_tokens(new - old)
    total.sum().backward()
    assert total.tolist() == [0.5]
    assert new.grad.tolist() == [1.0, 0.0]


def test_c5_pad_equal_to_eos():
    rows = GroupBatch.from_groups(
        [Group(prompt=[5, 6], completions=[[7, 2]]), Group(prompt=[5, 6, 5, 6], completions=[[7, 7]])]
    ).padded(pad_id=2)
    assert rows.input_ids[0].tolist() == [5, 6, 7, 2, 2, 2]
    assert rows.labels[0].tolist() == [-100, -100, 7, 2, -100, -100]
    assert rows.attention_mask[0].tolist() == [1, 1, 1, 1, 0, 0]
    assert rows.position[0].tolist() == [-1, -1, 0, 1, -1, -1]


def test_c6_the_first_completion_token_is_scored():
    batch = GroupBatch.from_groups([Group(prompt=[5], completions=[[7, 8, 9, 2]])])
    assert batch.scored_lengths().tolist() == [4]
    assert (batch.padded(pad_id=0).labels[0] != -100).sum() == 4


def test_padded_shows_what_is_not_scored():
    batch = GroupBatch.from_groups([Group(prompt=[5], completions=[[7, 8, 9]], scored=[[True, False, True]])])
    rows = batch.padded(pad_id=0)
    assert rows.labels.tolist() == [[-100, 7, -100, 9]]
    assert rows.position.tolist() == [[-1, 0, 1, 2]]


def test_an_empty_batch_has_sizes_and_a_padded_form():
    batch = GroupBatch.from_groups([])
    assert (batch.num_prompts, batch.num_completions, len(batch)) == (0, 0, 0)
    assert batch.padded(pad_id=0).input_ids.shape == (0, 0)
    assert batch.sum_tokens(torch.zeros(0)).shape == (0,)
