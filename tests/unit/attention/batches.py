"""Random ragged batches with shuffled pages, for tests of the attention operations."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from diffulex.attention.metadata import AttnMetaDataBase


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttnMetaDataBase


def make_inputs(
    sizes: list[tuple[int, int]],
    *,
    page_size: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """One request for each (rows, cached tokens); slots that no request owns are NaN."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    num_pages = [-(-context // page_size) for _, context in sizes]
    pool = list(range(sum(num_pages) + 2))
    rng.shuffle(pool)
    tables = torch.full((len(sizes), max([*num_pages, 1])), -1, dtype=torch.int32)
    shape = (len(pool), page_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    for request, (_, context) in enumerate(sizes):
        for page in range(num_pages[request]):
            tables[request, page] = pool.pop()
        for position in range(context):
            page_id, offset = int(tables[request, position // page_size]), position % page_size
            for cache in (k_cache, v_cache):
                cache[page_id, offset] = torch.randn(num_kv_heads, head_dim, generator=draw)
    total = sum(rows for rows, _ in sizes)
    ends = [rng.randint(1, rows + context + 6) for rows, context in sizes for _ in range(rows)]
    metadata = AttnMetaDataBase(
        cu_q_lens=torch.tensor([0] + [rows for rows, _ in sizes]).cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in sizes], dtype=torch.int32),
        page_tables=tables,
        slot_mapping=torch.full((total,), -1),
        visible_ends=torch.tensor(ends, dtype=torch.int32),
        page_size=page_size,
    )
    query = torch.randn(total, num_heads, head_dim, generator=draw).to(dtype)
    key, value = torch.randn(2, total, num_kv_heads, head_dim, generator=draw).to(dtype)
    return Inputs(query, key, value, k_cache, v_cache, metadata)
