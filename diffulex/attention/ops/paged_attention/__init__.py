"""Attention of a ragged batch over pages and its own rows; the form is chosen by `attn_impl`.

Axes: R requests, T packed rows, Hq query heads, Hk key heads (Hq is a multiple of Hk), D head width.
`reference.py` says what is computed, one request at a time; `padded.py` computes the same for many at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from diffulex.attention.ops.paged_attention.padded import padded_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diffulex.attention.metadata import AttnMetaDataBase

    AttendFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AttnMetaDataBase, float, int | None], Tensor]

__all__ = ["ATTENTION_FORMS", "paged_attention"]

ATTENTION_FORMS: Final[Mapping[str, AttendFn]] = {"naive": padded_attention}


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttnMetaDataBase,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Each row attends to its request's pages ``[0, context_len)`` and fresh rows, up to its visible end.

    Args:
        query: ``[T, Hq, D]``.
        key, value: ``[T, Hk, D]``, the fresh rows; they are read from here whether they are stored or not.
        k_cache, v_cache: as `CacheLayout.allocate` makes them, in either layout; may be empty,
            ``[0, Hk, D]``, when no request has a context.
        metadata: spans, pages and visible ends.
        scale: factor on the scores.
        window: with one, a row sees no position before `AttnMetaDataBase.visible_starts` either.

    Returns:
        ``[T, Hq, D]`` in the dtype of `query`; the softmax runs in float32. A row that is not a number
        reaches no row of another request.
    """
    return ATTENTION_FORMS[metadata.attn_impl](query, key, value, k_cache, v_cache, metadata, scale, window)
