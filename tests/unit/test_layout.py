"""Rows, positions and masks of the shared-prefix path, by hand."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from alignment.batches import Group, GroupBatch
from alignment.layout import LayerMask, additive, attention_mask, best_fit_decreasing, layer_masks, pack


def two_groups() -> GroupBatch:
    """Six tokens and three: one row of six, then three and padding."""
    return GroupBatch.from_groups(
        [
            Group(prompt=[10, 11, 12], completions=[[20], [21, 22]]),
            Group(prompt=[13], completions=[[], [23, 24]]),
        ]
    )


def test_best_fit_decreasing_by_hand():
    # 7 opens a row; 5 another; 3 fits only the row of 7 exactly (10), 3 goes with 5 (2 left), 2 fills it
    assert best_fit_decreasing([3, 7, 2, 5, 3], 10) == [[1, 0], [3, 4, 2]]
    assert best_fit_decreasing([], 4) == []
    with pytest.raises(ValueError, match="5 tokens does not fit a row of 4"):
        best_fit_decreasing([5], 4)


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_best_fit_decreasing_packs_everything_once_and_uses_few_rows(sizes):
    width = max(sizes)
    rows = best_fit_decreasing(sizes, width)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in row) for row in rows]
    assert all(load <= width for load in loads)
    # no two rows could have been one
    assert all(a + b > width for k, a in enumerate(loads) for b in loads[k + 1 :])


def test_rows_positions_and_predictors_by_hand():
    layout = pack(two_groups(), pad_id=0)
    assert layout.input_ids.tolist() == [[10, 11, 12, 20, 21, 22], [13, 23, 24, 0, 0, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 3, 4], [0, 1, 2, 0, 0, 0]]
    assert layout.group.tolist() == [[0] * 6, [1, 1, 1, -1, -1, -1]]
    assert layout.branch.tolist() == [[0, 0, 0, 1, 2, 2], [0, 4, 4, 0, 0, 0]]
    assert layout.place.tolist() == [3, 4, 5, 7, 8]
    assert layout.predictor.tolist() == [2, 2, 4, 6, 7]


def test_groups_share_a_row_when_they_fit():
    batch = GroupBatch.from_groups(
        [
            Group(prompt=[1], completions=[[2]]),
            Group(prompt=[3] * 3, completions=[[4]]),
            Group(prompt=[5], completions=[[6]]),
        ]
    )
    layout = pack(batch, pad_id=0)
    assert layout.input_ids.tolist() == [[3, 3, 3, 4], [1, 2, 5, 6]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert layout.predictor.tolist() == [4, 2, 6]


def rows_of(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def test_a_token_sees_its_prompt_and_its_own_completion():
    mask = attention_mask(pack(two_groups(), pad_id=0), LayerMask())
    assert mask.shape == (2, 1, 6, 6)
    assert rows_of(mask[0, 0]) == ["x.....", "xx....", "xxx...", "xxxx..", "xxx.x.", "xxx.xx"]
    assert rows_of(mask[1, 0]) == ["x.....", "xx....", "xxx...", "...x..", "...xx.", "...xxx"]


def test_windows_and_chunks_go_by_position():
    layout = pack(two_groups(), pad_id=0)
    # positions 0 1 2 3 3 4
    window = attention_mask(layout, LayerMask(window=2))[0, 0]
    assert rows_of(window) == ["x.....", "xx....", ".xx...", "..xx..", "..x.x.", "....xx"]
    chunk = attention_mask(layout, LayerMask(chunk=2))[0, 0]
    assert rows_of(chunk) == ["x.....", "xx....", "..x...", "..xx..", "..x.x.", ".....x"]


def test_additive_mask():
    lowest = torch.finfo(torch.bfloat16).min
    assert additive(torch.tensor([True, False]), torch.bfloat16).tolist() == [0.0, lowest]


def test_layer_masks_come_from_the_config():
    assert layer_masks(hf.LlamaConfig()) == {"full_attention": LayerMask()}
    assert layer_masks(hf.MistralConfig(sliding_window=9)) == {"sliding_attention": LayerMask(window=9)}
    assert layer_masks(hf.MistralConfig(sliding_window=None)) == {"full_attention": LayerMask()}
    assert layer_masks(hf.Gemma3TextConfig(sliding_window=5)) == {
        "full_attention": LayerMask(),
        "sliding_attention": LayerMask(window=5),
    }
    with pytest.raises(ValueError, match="linear_attention"):
        layer_masks(hf.Qwen3NextConfig())
