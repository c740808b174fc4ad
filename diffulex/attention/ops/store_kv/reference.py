"""The torch form of storing keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.attention.cache_layout import layout_of

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.attention.metadata import AttnMetaDataBase

_PLAN = "store_kv"


def store_rows(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttnMetaDataBase
) -> None:
    """Copy the rows whose slot is not negative."""
    rows, slots = _plan(metadata)
    if slots.numel() == 0:
        return
    layout = layout_of(k_cache)
    for fresh, cache in ((key, k_cache), (value, v_cache)):
        layout.write(cache, slots, fresh if rows is None else fresh.index_select(0, rows))


def _plan(metadata: AttnMetaDataBase) -> tuple[Tensor | None, Tensor]:
    """Rows to store (None for all of them) and their slots, found once a forward."""
    plan: tuple[Tensor | None, Tensor] | None = metadata.scratch.get(_PLAN)
    if plan is None:
        slots = metadata.slot_mapping
        rows = (slots >= 0).nonzero().squeeze(1)
        plan = (None, slots) if rows.numel() == slots.numel() else (rows, slots[rows])
        metadata.scratch[_PLAN] = plan
    return plan
