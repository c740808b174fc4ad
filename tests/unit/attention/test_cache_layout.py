from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffulex.attention.cache_layout import (
    CacheLayout,
    DistinctLayout,
    KVShape,
    UnifiedLayout,
    layout_of,
    make_layout,
)
from diffulex.attention.metadata import AttnMetaDataBase
from diffulex.attention.ops.paged_attention import paged_attention
from diffulex.attention.ops.paged_attention.reference import reference_attention
from diffulex.attention.ops.store_kv import store_kv
from diffulex.config import ConfigError
from tests.unit.attention.batches import Inputs, make_inputs

CPU = torch.device("cpu")
LAYOUTS = [UnifiedLayout(), DistinctLayout(1), DistinctLayout(4), DistinctLayout(8)]


def name_of(layout: CacheLayout) -> str:
    return layout.name + (str(layout.split) if isinstance(layout, DistinctLayout) else "")


def in_layout(inputs: Inputs, layout: CacheLayout) -> Inputs:
    """The same batch with its pages in another layout."""
    num_pages, page_size, heads, width = inputs.k_cache.shape
    k_cache, v_cache = layout.allocate(num_pages, page_size, KVShape(heads, width), inputs.k_cache.dtype, CPU)
    slots = torch.arange(num_pages * page_size)
    for cache, rows in ((k_cache, inputs.k_cache), (v_cache, inputs.v_cache)):
        layout.write(cache, slots, rows.flatten(0, 1))
    return inputs._replace(k_cache=k_cache, v_cache=v_cache)


def test_the_axes_are_those_of_the_documentation() -> None:
    keys, values = UnifiedLayout().allocate(3, 4, KVShape(2, 16), torch.bfloat16, CPU)
    assert keys.shape == values.shape == (3, 4, 2, 16)
    keys, values = DistinctLayout(8).allocate(3, 4, KVShape(2, 16), torch.bfloat16, CPU)
    assert keys.shape == (3, 2, 2, 4, 8)
    assert values.shape == (3, 2, 16, 4)
    assert keys.dtype == values.dtype == torch.bfloat16


def test_a_number_stands_where_the_axes_say() -> None:
    rows = torch.arange(2 * 16, dtype=torch.float32).view(1, 2, 16)
    keys, values = DistinctLayout(8).allocate(3, 4, KVShape(2, 16), torch.float32, CPU)
    slot = torch.tensor([1 * 4 + 2])
    for cache in (keys, values):
        DistinctLayout(8).write(cache, slot, rows)
    head, channel = 1, 13
    assert keys[1, head, channel // 8, 2, channel % 8] == rows[0, head, channel]
    assert values[1, head, channel, 2] == rows[0, head, channel]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_and_other_slots_stay(layout: CacheLayout, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    for cache in layout.allocate(5, 4, KVShape(3, 8), dtype, CPU):
        cache.fill_(7)
        slots = torch.randperm(20, generator=draw)[:9]
        # Keys are slices of a fused projection.
        rows = torch.randn(9, 7, 8, generator=draw).to(dtype)[:, 2:5]
        layout.write(cache, slots, rows)
        held = torch.empty(20, 3, 8, dtype=dtype)
        layout.read(cache, torch.arange(20), held)
        expected = torch.full((20, 3, 8), 7.0, dtype=dtype)
        expected[slots] = rows
        assert torch.equal(held, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_keys_tell_their_layout(layout: CacheLayout) -> None:
    keys, _ = layout.allocate(2, 4, KVShape(2, 16), torch.float32, CPU)
    assert name_of(layout_of(keys)) == name_of(layout)
    assert name_of(layout_of(torch.empty(0, 2, 16))) == "unified"


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=name_of)
def test_storing_skips_rows_without_a_slot_in_every_layout(layout: CacheLayout) -> None:
    key, value = torch.randn(2, 4, 2, 8)
    metadata = AttnMetaDataBase(slot_mapping=torch.tensor([3, -1, 9, 0]), page_size=4)
    k_cache, v_cache = (cache.fill_(7) for cache in layout.allocate(3, 4, KVShape(2, 8), torch.float32, CPU))
    store_kv(key, value, k_cache, v_cache, metadata)
    for cache, rows in ((k_cache, key), (v_cache, value)):
        held, expected = torch.empty(12, 2, 8), torch.full((12, 2, 8), 7.0)
        layout.read(cache, torch.arange(12), held)
        expected[[3, 9, 0]] = rows[[0, 2, 3]]
        assert torch.equal(held, expected)


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 20), st.one_of(st.just(0), st.integers(1, 30))), min_size=1, max_size=5
    ),
    page_size=st.sampled_from([4, 8, 32]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    split=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 999),
)
def test_attention_reads_the_same_rows_from_both_layouts(
    sizes: list[tuple[int, int]], page_size: int, heads: tuple[int, int], split: int, seed: int
) -> None:
    inputs = make_inputs(sizes, page_size=page_size, num_heads=heads[0], num_kv_heads=heads[1], seed=seed)
    other = in_layout(inputs, DistinctLayout(split))
    for form in (paged_attention, reference_attention):
        inputs.metadata.scratch.clear()
        assert torch.equal(form(*other, 0.3), form(*inputs, 0.3))


def test_what_is_not_a_number_stays_within_its_request_in_split_pages() -> None:
    inputs = in_layout(make_inputs([(5, 9), (16, 30), (3, 0), (16, 29)], seed=4), DistinctLayout(4))
    healthy = paged_attention(*inputs, 0.3)
    pages = [page for page in inputs.metadata.page_tables[1].tolist() if page >= 0]
    inputs.k_cache[pages] = math.nan
    inputs.v_cache[pages] = math.inf
    inputs.metadata.scratch.clear()
    after = paged_attention(*inputs, 0.3)
    others = torch.ones(40, dtype=torch.bool)
    others[5:21] = False
    assert torch.equal(after[others], healthy[others])
    assert not bool(torch.isfinite(after[5:21]).all())


def test_a_head_that_does_not_split_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"k_cache_hdim_split_factor_x \(8\) must divide .*\(20\)"):
        DistinctLayout(8).check(KVShape(2, 20))
    with pytest.raises(ConfigError, match="unified"):
        make_layout("distinct", 3).allocate(2, 4, KVShape(1, 8), torch.float32, CPU)
    make_layout("unified", 8).check(KVShape(2, 20))
