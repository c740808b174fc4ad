"""What a forward pass tells the attention layers: spans of requests, their pages, what each row sees.

The model runner binds one fetch function before the model runs; the layers call it. A strategy that needs
more fields subclasses `AttnMetaDataBase` and keeps its object in a `MetadataSlot`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor


def _no_int32() -> Tensor:
    return torch.empty(0, dtype=torch.int32)


def _no_int64() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def _no_pages() -> Tensor:
    return torch.empty(0, 0, dtype=torch.int32)


@dataclass(eq=False)
class AttnMetaDataBase:
    """One ragged batch of R requests and T rows, the same for all layers of a forward.

    The rows of request r are `[cu_q_lens[r], cu_q_lens[r + 1])` and hold the absolute positions
    `context_lens[r]` and following; the positions before are read from its pages.

    Attributes:
        cu_q_lens: ``[R + 1] int32``, borders of the requests in the packed rows; begins with 0, ends with T.
        context_lens: ``[R] int32``, tokens that are read from pages.
        page_tables: ``[R, max_pages] int32``, page ids in the order of positions, padded with -1.
        slot_mapping: ``[T] int64``, where a row's key and value are stored: page * page_size + offset,
            -1 for a row that is not stored. Storing happens before any row is attended.
        visible_ends: ``[T] int32``, a row sees the absolute positions ``[0, end)``, end at least 1. An end
            behind the last row of the request means the last row. This one vector expresses causal,
            block-causal, D2F and full masks.
        window_anchors: ``[T] int32``, read only by layers with a window. With a window of w positions a row
            sees nothing before ``anchor + 1 - w``. A causal row's anchor is its own position; the rows of a
            canvas share the canvas's first position, so all see the same last w - 1 positions before it.
        page_size: tokens in one page.
        attn_impl: which form of the operations runs.
        scratch: what a backend derives from the fields above, once for all layers of this forward.
    """

    cu_q_lens: Tensor = field(default_factory=_no_int32)
    context_lens: Tensor = field(default_factory=_no_int32)
    page_tables: Tensor = field(default_factory=_no_pages)
    slot_mapping: Tensor = field(default_factory=_no_int64)
    visible_ends: Tensor = field(default_factory=_no_int32)
    window_anchors: Tensor | None = None
    page_size: int = 0
    attn_impl: str = "naive"
    scratch: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def visible_starts(self, window: int) -> Tensor:
        """First position that each row sees in a layer with this window, ``[T] int32``."""
        if self.window_anchors is None:
            raise RuntimeError("a layer with a window runs without window_anchors; set them for this forward")
        return (self.window_anchors + (1 - window)).clamp_min(0)


FetchFn = Callable[[], AttnMetaDataBase]
MetadataT = TypeVar("MetadataT", bound=AttnMetaDataBase)


class MetadataSlot(Generic[MetadataT]):
    """Holds the metadata object of one strategy: made at import, filled by the runner, read by the layers."""

    def __init__(self, cls: type[MetadataT]) -> None:
        self._cls = cls
        self._current: MetadataT | None = None

    def fetch(self) -> MetadataT:
        """The object set last, an empty one when there is none."""
        if self._current is None:
            self._current = self._cls()
        return self._current

    def set(self, **fields: Any) -> None:
        """Replace the object by one with these fields."""
        self._current = self._cls(**fields)

    def reset(self) -> None:
        """Drop the object and with it the tensors of its forward."""
        self._current = None


_fetch_fn: FetchFn | None = None


def set_fetch_fn_for_attn_metadata(fn: FetchFn | None) -> None:
    """Attention layers of this process take their metadata from `fn`; None unbinds."""
    global _fetch_fn
    _fetch_fn = fn


def fetch_attn_metadata() -> AttnMetaDataBase:
    """The metadata of the forward that is running."""
    if _fetch_fn is None:
        raise RuntimeError(
            "no attention metadata is bound; call set_fetch_fn_for_attn_metadata before a forward"
        )
    return _fetch_fn()
