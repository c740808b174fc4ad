"""The meaning of paged attention: one request at a time, float32, no cleverness. Tests compare with it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from diffulex.attention.cache_layout import layout_of
from diffulex.attention.masks import mask_of

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.attention.metadata import AttnMetaDataBase


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttnMetaDataBase,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention` as its docstring says, request by request."""
    out = torch.empty_like(query)
    starts = None if window is None else metadata.visible_starts(window)
    borders = metadata.cu_q_lens.tolist()
    for request, (start, stop) in enumerate(pairwise(borders)):
        slots = _context_slots(metadata, request)
        keys = torch.cat([_cached(k_cache, k_cache, slots, key), key[start:stop]]).float()
        values = torch.cat([_cached(v_cache, k_cache, slots, value), value[start:stop]]).float()
        group = query.shape[1] // key.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), keys) * scale
        own_starts = None if starts is None else starts[start:stop]
        visible = mask_of(metadata.visible_ends[start:stop], keys.shape[0], own_starts)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out


def _cached(cache: Tensor, k_cache: Tensor, slots: Tensor, fresh: Tensor) -> Tensor:
    rows = fresh.new_empty(len(slots), *fresh.shape[1:])
    layout_of(k_cache).read(cache, slots, rows)
    return rows


def _context_slots(metadata: AttnMetaDataBase, request: int) -> Tensor:
    context_len = int(metadata.context_lens[request])
    positions = torch.arange(context_len, device=metadata.page_tables.device)
    if context_len == 0:
        return positions
    pages = metadata.page_tables[request].long()[positions // metadata.page_size]
    return pages * metadata.page_size + positions % metadata.page_size
