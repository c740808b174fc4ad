"""The attention layer of every family: store new keys and values, then attend to pages and new rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from diffulex.attention.cache_layout import KVShape
from diffulex.attention.metadata import fetch_attn_metadata
from diffulex.attention.ops.paged_attention import paged_attention
from diffulex.attention.ops.store_kv import store_kv

if TYPE_CHECKING:
    from torch import Tensor


class Attention(nn.Module):
    """Attention without weights, made by a decoder layer, one each.

    The model runner sets `k_cache` and `v_cache`, made by `CacheLayout.allocate`; as long as they are None
    nothing is stored and no request may have a context.

    Args:
        num_heads, num_kv_heads: heads of this process.
        head_dim: width of a head.
        scale: factor on the scores.
        window: how far a row looks back, itself included, as the metadata's `window_anchors` say; None is
            without bound.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None = None
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    @property
    def kv_shape(self) -> KVShape:
        """Shape of this layer's part of a cache slot."""
        return KVShape(self.num_kv_heads, self.head_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with the metadata of the running forward.

        Args:
            query: ``[T, num_heads, head_dim]``, which is the shape of the result as well.
            key, value: ``[T, num_kv_heads, head_dim]``.
        """
        metadata = fetch_attn_metadata()
        k_cache, v_cache = self.k_cache, self.v_cache
        if k_cache is None or v_cache is None:
            k_cache = v_cache = key[:0]
        else:
            store_kv(key, value, k_cache, v_cache, metadata)
        return paged_attention(query, key, value, k_cache, v_cache, metadata, self.scale, self.window)
