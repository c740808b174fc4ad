from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from diffulex.attention.layer import Attention
from diffulex.attention.metadata import set_fetch_fn_for_attn_metadata
from diffulex.attention.ops.paged_attention.reference import reference_attention
from tests.unit.attention.batches import make_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    set_fetch_fn_for_attn_metadata(None)


def test_new_keys_are_stored_before_anyone_attends() -> None:
    """Request 1 reads a page that request 0 fills in the same forward, as equal prompts do."""
    inputs = make_inputs([(4, 0), (3, 4)], page_size=4)
    metadata = inputs.metadata
    metadata.slot_mapping[:4] = int(metadata.page_tables[1, 0]) * 4 + torch.arange(4)
    inputs.k_cache.fill_(torch.nan)
    inputs.v_cache.fill_(torch.nan)
    layer = Attention(4, 2, 8, 0.3)
    layer.k_cache, layer.v_cache = inputs.k_cache, inputs.v_cache
    set_fetch_fn_for_attn_metadata(lambda: metadata)
    out = layer(inputs.query, inputs.key, inputs.value)
    assert bool(torch.isfinite(out).all())
    assert torch.equal(inputs.k_cache[metadata.page_tables[1, 0]], inputs.key[:4])
    torch.testing.assert_close(out, reference_attention(*inputs, 0.3))


def test_without_a_cache_rows_attend_to_each_other() -> None:
    inputs = make_inputs([(4, 0), (3, 0)])
    inputs.metadata.slot_mapping[:] = 1
    set_fetch_fn_for_attn_metadata(lambda: inputs.metadata)
    out = Attention(4, 2, 8, 0.3)(inputs.query, inputs.key, inputs.value)
    torch.testing.assert_close(out, reference_attention(*inputs, 0.3))
