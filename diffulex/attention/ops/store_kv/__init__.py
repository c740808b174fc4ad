"""Write the keys and values of new rows into their pages; called by the attention layer before it attends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from diffulex.attention.ops.store_kv.reference import store_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diffulex.attention.metadata import AttnMetaDataBase

    StoreFn = Callable[[Tensor, Tensor, Tensor, Tensor, AttnMetaDataBase], None]

__all__ = ["STORE_FORMS", "store_kv"]

STORE_FORMS: Final[Mapping[str, StoreFn]] = {"naive": store_rows}


def store_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttnMetaDataBase
) -> None:
    """Every row with a slot stands in the cache afterwards; no other slot has changed.

    Args:
        key, value: ``[T, Hk, D]``, the rows of this forward.
        k_cache, v_cache: as `CacheLayout.allocate` makes them, in either layout.
        metadata: gives `slot_mapping` and `attn_impl`.
    """
    STORE_FORMS[metadata.attn_impl](key, value, k_cache, v_cache, metadata)
