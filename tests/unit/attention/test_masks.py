from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffulex.attention import masks
from diffulex.attention.metadata import AttnMetaDataBase

LENGTHS = st.integers(1, 24)
BLOCKS = st.sampled_from([1, 2, 3, 4, 8, 32])


def rows(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def test_causal_sees_itself_and_the_past() -> None:
    assert rows(masks.causal(3)) == ["x..", "xx.", "xxx"]


def test_block_causal_sees_whole_blocks_on_the_absolute_grid() -> None:
    assert rows(masks.block_causal(5, 2)) == ["xx...", "xx...", "xxxx.", "xxxx.", "xxxxx"]


def test_block_causal_can_start_elsewhere() -> None:
    assert rows(masks.block_causal(5, 2, origin=3)) == ["x....", "xxx..", "xxx..", "xxxxx", "xxxxx"]


def test_d2f_closes_the_prompt_and_counts_blocks_from_its_end() -> None:
    assert rows(masks.d2f(6, 3, 2)) == ["xxx...", "xxx...", "xxx...", "xxxxx.", "xxxxx.", "xxxxxx"]


def test_d2f_on_the_grid_shares_the_last_prompt_block_with_masks() -> None:
    assert rows(masks.d2f(6, 3, 2, origin=0)) == ["xxx...", "xxx...", "xxx...", "xxxx..", "xxxxxx", "xxxxxx"]


def test_full_sees_everything() -> None:
    assert bool(masks.full(4).all())
    assert masks.full(4).shape == (4, 4)


def test_a_sliding_row_sees_as_many_positions_as_the_window_has() -> None:
    assert rows(masks.sliding(5, 3)) == ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]


def test_a_canvas_sees_one_rectangle_with_and_without_a_window() -> None:
    assert rows(masks.canvas(4, 2)) == ["xxxxxx", "xxxxxx"]
    assert rows(masks.canvas(4, 3, window=3)) == ["..xxxxx", "..xxxxx", "..xxxxx"]
    assert rows(masks.canvas(2, 2, window=9)) == ["xxxx", "xxxx"]
    assert rows(masks.canvas(2, 2, window=1)) == ["..xx", "..xx"]


@given(length=LENGTHS, prefix_len=st.integers(0, 20), window=st.integers(1, 30))
def test_anchors_say_the_same_as_the_windowed_matrices(length: int, prefix_len: int, window: int) -> None:
    own = torch.arange(length)
    starts = AttnMetaDataBase(window_anchors=own.int()).visible_starts(window)
    assert torch.equal(masks.mask_of(own + 1, length, starts), masks.sliding(length, window))
    anchors = torch.full((length,), prefix_len, dtype=torch.int32)
    starts = AttnMetaDataBase(window_anchors=anchors).visible_starts(window)
    end = prefix_len + length
    expected = masks.canvas(prefix_len, length, window)
    assert torch.equal(masks.mask_of(torch.full((length,), end), end, starts), expected)


@given(length=LENGTHS, block=BLOCKS, origin=st.integers(0, 8), prompt_len=st.integers(1, 24))
def test_visible_ends_say_the_same_as_the_matrices(
    length: int, block: int, origin: int, prompt_len: int
) -> None:
    positions = torch.arange(length)
    pairs = [
        (masks.full_ends(positions, length), masks.full(length)),
        (masks.causal_ends(positions), masks.causal(length)),
        (masks.block_causal_ends(positions, block, origin), masks.block_causal(length, block, origin)),
        (masks.d2f_ends(positions, prompt_len, block), masks.d2f(length, prompt_len, block)),
    ]
    if origin <= prompt_len:
        expected = masks.d2f(length, prompt_len, block, origin)
        pairs.append((masks.d2f_ends(positions, prompt_len, block, origin), expected))
    for ends, matrix in pairs:
        assert torch.equal(masks.mask_of(ends, length), matrix)


@given(length=LENGTHS)
def test_blocks_of_one_are_causal_and_one_big_block_is_full(length: int) -> None:
    assert torch.equal(masks.block_causal(length, 1), masks.causal(length))
    assert torch.equal(masks.block_causal(length, 32), masks.full(length))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ends_keep_the_type_of_the_positions(dtype: torch.dtype) -> None:
    positions = torch.arange(5, dtype=dtype)
    assert masks.block_causal_ends(positions, 4).dtype == dtype
    assert masks.d2f_ends(positions, 2, 4).dtype == dtype
