"""Where completions stand in the cache: worked by hand on two prompts."""

from __future__ import annotations

import torch

from alignment.branches import Branches, StepCosts, best_width


def opened() -> Branches:
    """Prompts of 2 and 3 tokens with 3 and 2 completions."""
    return Branches.opened(torch.tensor([2, 3]), torch.tensor([3, 2]))


def test_opened_rows_are_the_prompts():
    b = opened()
    assert b.prompt_of.tolist() == [0, 0, 0, 1, 1]
    assert b.slot.tolist() == [0, 0, 0, 1, 1]
    assert (b.rows, b.width, b.prompt_columns, b.done) == (2, 1, 3, 0)


def test_first_arrangement_takes_each_row_from_its_prompt():
    b, row, column = opened().arranged(2)
    # prompt 0 needs two rows for three branches; the last slot of the second is dead
    assert b.row_prompt.tolist() == [0, 0, 1]
    assert b.slot.tolist() == [0, 1, 2, 4, 5]
    assert row.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert column.tolist() == [[0, 1, 2]] * 3


def test_rearrangement_moves_live_branches_with_their_steps():
    b, _, _ = opened().arranged(2)
    b = b.stepped().stepped()
    # columns now: prompt 0-2, step 1 in 3-4, step 2 in 5-6; branches 1 of prompt 0 and 2 of prompt 0 stay
    b = b.kept(torch.tensor([False, True, True, False, False]))
    assert b.slot.tolist() == [1, 2]
    new, row, column = b.arranged(2)
    assert (new.row_prompt.tolist(), new.slot.tolist(), new.prompt_columns) == ([0], [0, 1], 2)
    # prompt 0 is right-aligned in columns 1-2; then step 1 and step 2 of both: slot 1 of row 0, slot 0 of row 1
    assert row.tolist() == [[0, 0, 0, 1, 0, 1]]
    assert column.tolist() == [[1, 2, 4, 3, 6, 5]]


def test_cells_of_dead_slots_have_a_source_within_the_cache():
    b, _, _ = opened().arranged(3)
    b = b.stepped().kept(torch.tensor([True, False, False, True, True]))
    _, row, column = b.arranged(2)
    # row 0 holds one live branch: its second slot comes from slot 0 of the prompt's old row
    assert row.tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert column.tolist() == [[0, 1, 2, 3, 3], [0, 1, 2, 3, 4]]


def test_a_slot_sees_its_prompt_and_its_own_columns():
    b, _, _ = opened().arranged(2)
    seen = b.visible(7, torch.float32) == 0
    assert seen.shape == (3, 1, 2, 7)
    assert seen[0, 0].int().tolist() == [[0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 0, 1, 0, 1]]  # a prompt of 2 in 3 columns
    assert seen[2, 0].int().tolist() == [[1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0, 1]]
    assert b.visible(7, torch.float32).min() == torch.finfo(torch.float32).min


def test_positions_continue_the_prompt():
    b, _, _ = opened().arranged(2)
    assert b.positions(7)[:, 1:].tolist() == [[0, 1, 2, 2, 3, 3], [0, 1, 2, 2, 3, 3], [1, 2, 3, 3, 4, 4]]


def test_cost_by_hand():
    costs = StepCosts(token=10.0, score=1.0, read=3.0)
    # 4 rows of 2 slots, 5 + 2 * 3 columns: 8 slots in the layers, 8 * 11 scores, 4 * 11 tokens read
    assert costs.of(4, 2, 5, 3.0) == 8 * 10 + 8 * 11 + 4 * 11 * 3


def test_long_prompts_want_wide_rows_and_long_completions_narrow_ones():
    costs = StepCosts(token=0.0, score=1.0, read=16.0)
    assert best_width([8, 8], 1000, 10.0, costs)[0] == 8
    assert best_width([8, 8], 10, 1000.0, costs)[0] == 1
    # reading is free of charge for no one: with nothing but the layers' cost, dead slots decide
    assert best_width([3, 1], 100, 1.0, StepCosts(token=1.0, score=0.0, read=0.0))[0] == 1
