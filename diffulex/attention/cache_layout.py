"""How keys and values of one layer lie in memory: two layouts behind one interface, equal in what they hold.

Callers speak of slots, ``page * page_size + offset``, and of rows ``[N, Hk, D]``; only this file and the
kernels know the axes. `allocate_cache` of the model runner makes the tensors, storing and attending find the
layout by the tensors themselves.

Axes: P pages, S slots of a page, Hk key heads, D head width, x width of a piece of a head, N rows.

| layout | keys | values |
| --- | --- | --- |
| `unified` | ``[P, S, Hk, D]`` | ``[P, S, Hk, D]`` |
| `distinct` | ``[P, Hk, D / x, S, x]`` | ``[P, Hk, D, S]`` |

`unified` keeps the heads of a position together: one copy a row. `distinct` keeps a page head by head and
the same piece of neighbouring positions together, for kernels whose threads each take a position; the torch
forms have to gather such rows piece by piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from diffulex.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class KVShape(NamedTuple):
    """What a layer keeps of one position: as many keys and as many values of this width."""

    num_kv_heads: int
    head_dim: int


class CacheLayout(ABC):
    """Makes, fills and reads the keys and values of a layer; `cache` is either of the two."""

    name: ClassVar[str]

    @abstractmethod
    def check(self, shape: KVShape) -> None:
        """A layer of this shape can be kept.

        Raises:
            ConfigError: the head width does not divide.
        """

    @abstractmethod
    def allocate(
        self, num_pages: int, page_size: int, shape: KVShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, not cleared."""

    @abstractmethod
    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """`rows` ``[N, Hk, D]`` stand in `slots` ``[N] int64``; no other slot has changed."""

    @abstractmethod
    def read(self, cache: Tensor, slots: Tensor, out: Tensor) -> None:
        """`out` ``[N, Hk, D]``, contiguous, holds the rows of `slots` ``[N] int64``."""


class UnifiedLayout(CacheLayout):
    """A position's heads lie together."""

    name = "unified"

    def check(self, shape: KVShape) -> None:
        """Any shape can be kept."""

    def allocate(
        self, num_pages: int, page_size: int, shape: KVShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Two tensors ``[P, S, Hk, D]``."""
        size = (num_pages, page_size, *shape)
        return torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """One copy a row."""
        cache.view(-1, *cache.shape[-2:]).index_copy_(0, slots, rows)

    def read(self, cache: Tensor, slots: Tensor, out: Tensor) -> None:
        """One copy a row."""
        torch.index_select(cache.view(-1, *cache.shape[-2:]), 0, slots, out=out)


@dataclass(frozen=True, slots=True)
class DistinctLayout(CacheLayout):
    """A page lies head by head; keys in pieces of `split` numbers, values number by number.

    `split` is ``k_cache_hdim_split_factor_x``; of the tensors themselves it can be read off as well.
    """

    name: ClassVar[str] = "distinct"
    split: int

    def check(self, shape: KVShape) -> None:
        """The head width is a multiple of `split`."""
        if shape.head_dim % self.split:
            raise ConfigError(
                [
                    f"k_cache_hdim_split_factor_x ({self.split}) must divide the head width "
                    f"({shape.head_dim}) of the model; choose a divisor or use kv_cache_layout='unified'"
                ]
            )

    def allocate(
        self, num_pages: int, page_size: int, shape: KVShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """``[P, Hk, D / x, S, x]`` and ``[P, Hk, D, S]``."""
        self.check(shape)
        heads, width = shape
        keys = (num_pages, heads, width // self.split, page_size, self.split)
        values = (num_pages, heads, width, page_size)
        return torch.empty(keys, dtype=dtype, device=device), torch.empty(values, dtype=dtype, device=device)

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Pieces of each row go to their places."""
        page_size = cache.shape[3]
        by_token = _by_token(cache)
        if cache.ndim == 5:
            rows = rows.reshape(len(rows), *cache.shape[1:3], cache.shape[4])
        by_token[slots // page_size, slots % page_size] = rows

    def read(self, cache: Tensor, slots: Tensor, out: Tensor) -> None:
        """Pieces of each row come from their places."""
        page_size = cache.shape[3]
        pages, offsets = slots // page_size, slots % page_size
        if cache.ndim == 4:
            out.copy_(_by_token(cache)[pages, offsets])
            return
        # Whole pieces are copied faster through their own numbers than number by number.
        heads, pieces, width = cache.shape[1], cache.shape[2], cache.shape[4]
        piece_id = torch.arange(heads * pieces, device=slots.device) * page_size
        first = pages * (heads * pieces * page_size) + offsets
        torch.index_select(
            cache.view(-1, width), 0, (first.unsqueeze(1) + piece_id).flatten(), out=out.view(-1, width)
        )


def _by_token(cache: Tensor) -> Tensor:
    """A view ``[P, S, Hk, ...]`` of keys or values in the distinct layout."""
    return cache.permute(0, 3, 1, 2, 4) if cache.ndim == 5 else cache.permute(0, 3, 1, 2)


def make_layout(name: str, split: int) -> CacheLayout:
    """The layout that ``kv_cache_layout`` and ``k_cache_hdim_split_factor_x`` ask for."""
    return DistinctLayout(split) if name == DistinctLayout.name else UnifiedLayout()


_UNIFIED = UnifiedLayout()


def layout_of(k_cache: Tensor) -> CacheLayout:
    """The layout of a layer by its keys: only `distinct` splits a head, which gives them a fifth axis."""
    return DistinctLayout(k_cache.shape[4]) if k_cache.ndim == 5 else _UNIFIED
