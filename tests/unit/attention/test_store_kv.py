from __future__ import annotations

import pytest
import torch

from diffulex.attention.metadata import AttnMetaDataBase
from diffulex.attention.ops.store_kv import store_kv


@pytest.mark.parametrize("slots", [[3, -1, 9, 0], [11, 10, 2, 1], [-1, -1, -1, -1]])
def test_rows_with_a_slot_are_stored_there_and_nothing_else_changes(slots: list[int]) -> None:
    key, value = torch.randn(2, 4, 2, 5)
    k_cache, v_cache = torch.full((2, 3, 4, 2, 5), 7.0)
    metadata = AttnMetaDataBase(slot_mapping=torch.tensor(slots), page_size=4)
    store_kv(key, value, k_cache, v_cache, metadata)
    expected_k, expected_v = torch.full((2, 12, 2, 5), 7.0)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected_k[slot], expected_v[slot] = key[row], value[row]
    assert torch.equal(k_cache.view(12, 2, 5), expected_k)
    assert torch.equal(v_cache.view(12, 2, 5), expected_v)


def test_rows_that_lie_apart_in_memory_are_stored_right() -> None:
    """Keys are slices of a fused projection."""
    fused = torch.randn(3, 4, 5)
    k_cache, v_cache = torch.zeros(2, 1, 4, 1, 5)
    store_kv(
        fused[:, 2:3], fused[:, 3:4], k_cache, v_cache, AttnMetaDataBase(slot_mapping=torch.tensor([2, 0, 1]))
    )
    assert torch.equal(k_cache[0, :3, 0], fused[[1, 2, 0], 2])
    assert torch.equal(v_cache[0, :3, 0], fused[[1, 2, 0], 3])
