"""Layers with a window: where the visible part of a row begins, in both forms, over pages and fresh rows."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffulex.attention import masks
from diffulex.attention.cache_layout import KVShape
from diffulex.attention.layer import Attention
from diffulex.attention.metadata import set_fetch_fn_for_attn_metadata
from diffulex.attention.ops.paged_attention import paged_attention
from diffulex.attention.ops.paged_attention.reference import reference_attention
from tests.unit.attention.batches import Inputs, make_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMS = [paged_attention, reference_attention]
SIZES = st.lists(
    st.tuples(st.integers(1, 20), st.one_of(st.just(0), st.integers(1, 40))), min_size=1, max_size=6
)


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    set_fetch_fn_for_attn_metadata(None)


def as_passes(inputs: Inputs, is_canvas: list[bool]) -> None:
    """Each request is one canvas on its context, or rows that are encoded causally behind it."""
    metadata, ends, anchors = inputs.metadata, [], []
    borders = metadata.cu_q_lens.tolist()
    contexts = metadata.context_lens.tolist()
    for (start, stop), context, canvas in zip(pairwise(borders), contexts, is_canvas, strict=True):
        length = stop - start
        own = list(range(context, context + length))
        ends += [context + length] * length if canvas else [position + 1 for position in own]
        anchors += [context] * length if canvas else own
    metadata.visible_ends = torch.tensor(ends, dtype=torch.int32)
    metadata.window_anchors = torch.tensor(anchors, dtype=torch.int32)


def softmax_by_mask(
    inputs: Inputs, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    group = inputs.query.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", inputs.query, keys.repeat_interleave(group, 1)) * 0.3
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [1, 4, 9, 100])
@pytest.mark.parametrize("context", [0, 11])
@pytest.mark.parametrize("canvas", [True, False])
def test_one_request_follows_the_boolean_definition(
    form: object, window: int, context: int, canvas: bool
) -> None:
    inputs = make_inputs([(6, context)], page_size=4)
    as_passes(inputs, [canvas])
    pages = inputs.metadata.page_tables[0, : -(-context // 4)].long()
    keys = torch.cat([inputs.k_cache[pages].flatten(0, 1)[:context], inputs.key])
    values = torch.cat([inputs.v_cache[pages].flatten(0, 1)[:context], inputs.value])
    mask = masks.canvas(context, 6, window) if canvas else masks.sliding(context + 6, window)[context:]
    out = form(*inputs, 0.3, window)  # type: ignore[operator]
    torch.testing.assert_close(out, softmax_by_mask(inputs, mask, keys, values), atol=2e-6, rtol=1e-5)


@given(
    sizes=SIZES,
    page_size=st.sampled_from([4, 8, 32]),
    window=st.integers(1, 50),
    seed=st.integers(0, 999),
)
def test_ragged_batches_of_both_passes_equal_one_request_at_a_time(
    sizes: list[tuple[int, int]], page_size: int, window: int, seed: int
) -> None:
    inputs = make_inputs(sizes, page_size=page_size, seed=seed)
    rng = random.Random(seed)
    as_passes(inputs, [rng.random() < 0.5 for _ in sizes])
    expected = reference_attention(*inputs, 0.3, window)
    torch.testing.assert_close(paged_attention(*inputs, 0.3, window), expected, atol=2e-6, rtol=1e-5)


def test_layers_with_and_without_a_window_and_of_other_shapes_share_one_forward() -> None:
    sizes = [(4, 30), (7, 0), (4, 3)]
    narrow = make_inputs(sizes, num_kv_heads=2, head_dim=8, seed=1)
    wide = make_inputs(sizes, num_kv_heads=1, head_dim=16, seed=1)
    as_passes(narrow, [True, False, True])
    metadata = narrow.metadata
    for _ in range(2):
        for inputs, window in ((narrow, 5), (narrow, None), (wide, 9), (wide, None)):
            out = paged_attention(*inputs[:5], metadata, 0.3, window)
            expected = reference_attention(*inputs[:5], metadata, 0.3, window)
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    assert len(metadata.scratch) == 4


def test_cached_positions_that_no_row_sees_are_not_read() -> None:
    inputs = make_inputs([(3, 20), (3, 2)], page_size=4)
    as_passes(inputs, [True, False])
    healthy = paged_attention(*inputs, 0.3, 6)
    unseen = inputs.metadata.page_tables[0, :3].long()
    inputs.k_cache[unseen], inputs.v_cache[unseen] = torch.nan, torch.nan
    inputs.metadata.scratch.clear()
    assert torch.equal(paged_attention(*inputs, 0.3, 6), healthy)


def test_the_layer_passes_its_window_on_and_states_its_shape() -> None:
    inputs = make_inputs([(5, 9)])
    as_passes(inputs, [True])
    set_fetch_fn_for_attn_metadata(lambda: inputs.metadata)
    layer = Attention(4, 2, 8, 0.3, window=4)
    layer.k_cache, layer.v_cache = inputs.k_cache, inputs.v_cache
    out = layer(inputs.query, inputs.key, inputs.value)
    torch.testing.assert_close(out, reference_attention(*inputs, 0.3, 4))
    assert float((out - reference_attention(*inputs, 0.3)).abs().max()) > 1e-3
    assert layer.kv_shape == KVShape(num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_without_anchors_is_a_fault_of_the_caller(form: object) -> None:
    inputs = make_inputs([(2, 2)])
    with pytest.raises(RuntimeError, match="without window_anchors"):
        form(*inputs, 0.3, 4)  # type: ignore[operator]
