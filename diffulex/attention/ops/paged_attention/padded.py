"""Paged attention as a few padded batches: the torch form that serves the CPU.

Requests of similar size share one call of `scaled_dot_product_attention` (float32 inside). Where a request
is shorter than its batch, the padding repeats the request's own first row or first cached token, so that a
value that is not a number cannot reach a neighbour through a product with a zero weight.

Axes: G requests of a batch, Q and C its longest query and context, Hq / Hk heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from diffulex.attention.cache_layout import layout_of

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.attention.cache_layout import CacheLayout
    from diffulex.attention.metadata import AttnMetaDataBase

_PLAN = "padded_attention"
# One more batch costs about as much as this many scores (rows x keys); measured with 4 heads of width 64 on
# a CPU core. Wider models pay more a score, for them the border matters less.
_BATCH_COST = 2048


class _Span(NamedTuple):
    """One request: its number, rows, and tokens read from pages, from position `first` on."""

    request: int
    num_rows: int
    context_len: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Where one padded batch reads: `rows` ``[G * Q]``, `slots` ``[G * (C + Q)]`` or None when C is 0.

    `is_row` ``[G * Q]`` is False where the padding repeats a row. The Q slots at each request's end are place
    holders for its fresh rows. The buffers ``[G * (C + Q), Hk, D]`` take keys and values, layer after layer:
    fresh memory of that size would cost more than the copy into it. `mask` is additive,
    ``[G, 1, Q, C + Q]``, or None when every row sees every key.
    """

    num_requests: int
    rows: Tensor
    is_row: Tensor
    slots: Tensor | None
    k_buffer: Tensor | None
    v_buffer: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The batches of a forward; `order` ``[T]`` picks each packed row out of their joined outputs.

    `order` is None when the joined outputs are the packed rows already.
    """

    batches: tuple[_Batch, ...]
    order: Tensor | None


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttnMetaDataBase,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention` for many requests at once."""
    name = (_PLAN, window, *key.shape[1:])
    plan: _Plan | None = metadata.scratch.get(name)
    if plan is None:
        plan = _make_plan(metadata, key, None if window is None else metadata.visible_starts(window))
        metadata.scratch[name] = plan
    whole = plan.order is None and len(plan.batches) == 1
    layout = layout_of(k_cache)
    outputs = [
        scaled_dot_product_attention(
            _rows_of(query, batch, whole).transpose(1, 2),
            _keys_of(key, k_cache, layout, batch, batch.k_buffer, whole).transpose(1, 2),
            _keys_of(value, v_cache, layout, batch, batch.v_buffer, whole).transpose(1, 2),
            attn_mask=batch.mask,
            scale=scale,
            enable_gqa=True,
        )
        .transpose(1, 2)
        .reshape(-1, *query.shape[1:])
        for batch in plan.batches
    ]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.order is None else joined.index_select(0, plan.order)


def _rows_of(fresh: Tensor, batch: _Batch, whole: bool) -> Tensor:
    """The rows of a batch, ``[G, Q, H, D]``; `whole` says that they are all rows in their order."""
    rows = fresh if whole else fresh.index_select(0, batch.rows)
    return rows.view(batch.num_requests, -1, *fresh.shape[1:])


def _keys_of(
    fresh: Tensor, cache: Tensor, layout: CacheLayout, batch: _Batch, buffer: Tensor | None, whole: bool
) -> Tensor:
    """Cached and then fresh keys (or values) of a batch, ``[G, C + Q, Hk, D]``."""
    rows = _rows_of(fresh, batch, whole)
    if batch.slots is None or buffer is None:
        return rows
    layout.read(cache, batch.slots, buffer)
    keys = buffer.view(batch.num_requests, -1, *fresh.shape[1:])
    keys[:, -rows.shape[1] :] = rows
    return keys


def _make_plan(metadata: AttnMetaDataBase, key: Tensor, starts: Tensor | None) -> _Plan:
    borders = metadata.cu_q_lens.tolist()
    contexts = metadata.context_lens.tolist()
    firsts = [0] * len(contexts) if starts is None else _first_read(starts.tolist(), borders, contexts)
    spans = [
        _Span(request, borders[request + 1] - borders[request], context_len - first, first)
        for request, (context_len, first) in enumerate(zip(contexts, firsts, strict=True))
    ]
    groups = group_spans([span for span in spans if span.num_rows > 0])
    batches = tuple(_make_batch(metadata, group, key, starts) for group in groups)
    num_rows = borders[-1]
    device = metadata.visible_ends.device
    rows = torch.cat([batch.rows for batch in batches])
    if rows.numel() == num_rows and torch.equal(rows, torch.arange(num_rows, device=device)):
        return _Plan(batches, None)
    kept = torch.cat([batch.is_row for batch in batches]).nonzero().squeeze(1)
    order = torch.empty(num_rows, dtype=torch.int64, device=device)
    order[rows[kept]] = kept
    return _Plan(batches, order)


def _first_read(starts: list[int], borders: list[int], contexts: list[int]) -> list[int]:
    """For each request the first cached position that one of its rows sees; its context's end if none is."""
    return [
        min([context_len, *starts[start:stop]])
        for (start, stop), context_len in zip(pairwise(borders), contexts, strict=True)
    ]


def group_spans(spans: list[_Span]) -> list[list[_Span]]:
    """Split requests into batches so that padding costs less than another batch would.

    Requests with and without a context never share a batch: one without has no cached token to repeat.
    """
    groups: list[list[_Span]] = []
    widest = 0, 0
    for span in sorted(spans, key=lambda span: (span.context_len > 0, span.num_rows, span.context_len)):
        size = span.num_rows, span.num_rows + span.context_len
        if groups and (groups[-1][0].context_len > 0) == (span.context_len > 0):
            shared = max(widest[0], size[0]), max(widest[1], size[1])
            count = len(groups[-1])
            apart = count * widest[0] * widest[1] + size[0] * size[1] + _BATCH_COST
            if (count + 1) * shared[0] * shared[1] <= apart:
                groups[-1].append(span)
                widest = shared
                continue
        groups.append([span])
        widest = size
    for group in groups:
        group.sort()
    return groups


def _make_batch(metadata: AttnMetaDataBase, group: list[_Span], key: Tensor, starts: Tensor | None) -> _Batch:
    device = metadata.visible_ends.device
    longest, longest_context = max(s.num_rows for s in group), max(s.context_len for s in group)
    sizes = torch.tensor([list(span) for span in group], device=device)
    request, num_rows, context_len, first = sizes.T.unsqueeze(-1)
    row_id = torch.arange(longest, device=device).expand(len(group), -1)
    is_row = row_id < num_rows
    rows = metadata.cu_q_lens[request].long() + row_id * is_row
    is_key, positions = is_row, first + context_len + row_id
    slots = k_buffer = v_buffer = None
    if longest_context > 0:
        cached_id = torch.arange(longest_context, device=device).expand(len(group), -1)
        is_cached = cached_id < context_len
        own = first + cached_id * is_cached
        page_size = metadata.page_size
        pages = metadata.page_tables[request.squeeze(-1)].long().gather(1, own // page_size)
        slots = pages * page_size + own % page_size
        slots = torch.cat([slots, slots[:, :1].expand(-1, longest)], dim=1).flatten()
        k_buffer = key.new_empty(slots.numel(), *key.shape[1:])
        v_buffer = torch.empty_like(k_buffer)
        is_key = torch.cat([is_cached, is_row], dim=1)
        positions = torch.cat([first + cached_id, positions], dim=1)
    visible = is_key.unsqueeze(1) & (positions.unsqueeze(1) < metadata.visible_ends[rows].unsqueeze(-1))
    if starts is not None:
        visible &= positions.unsqueeze(1) >= starts[rows].unsqueeze(-1)
    mask = None
    if not bool(visible.all()):
        mask = torch.zeros(visible.shape, dtype=key.dtype, device=device).masked_fill_(~visible, -torch.inf)
        mask = mask.unsqueeze(1)
    return _Batch(len(group), rows.flatten(), is_row.flatten(), slots, k_buffer, v_buffer, mask)
