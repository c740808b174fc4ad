"""Every kind of visibility as a boolean matrix, which defines it, and as a vector of visible ends.

Axes: L positions. Row i of a matrix is True where position i may see position j. In all kinds a position
sees a prefix ``[0, end)`` of the sequence, so one end a row says the same; the engine carries ends.
An end may lie behind the sequence, where a block is cut by it. A layer with a window hides the beginning of
that prefix as well; where the window of a row stands is said by its anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor


def full(length: int) -> Tensor:
    """Every position sees every position; ``[L, L] bool``."""
    return torch.ones(length, length, dtype=torch.bool)


def causal(length: int) -> Tensor:
    """A position sees itself and what is before it; ``[L, L] bool``."""
    query, key = _grid(length)
    return key <= query


def block_causal(length: int, block_size: int, origin: int = 0) -> Tensor:
    """A position sees its own block and the blocks before it; ``[L, L] bool``.

    Blocks are counted from `origin`; positions before it lie in blocks with negative numbers.
    """
    query, key = _grid(length)
    return _block(key, block_size, origin) <= _block(query, block_size, origin)


def d2f(length: int, prompt_len: int, block_size: int, origin: int | None = None) -> Tensor:
    """The prompt sees itself, wholly; behind it a position sees the prompt, earlier blocks, its own block.

    Blocks are counted from `origin`: the end of the prompt when it is None, 0 for the absolute grid, where
    the block at the end of the prompt may hold prompt positions as well. ``[L, L] bool``.
    """
    query, key = _grid(length)
    start = prompt_len if origin is None else origin
    behind = _block(key, block_size, start) <= _block(query, block_size, start)
    return (key < prompt_len) | ((query >= prompt_len) & behind)


def sliding(length: int, window: int) -> Tensor:
    """A position sees itself and the ``window - 1`` positions before it; ``[L, L] bool``."""
    query, key = _grid(length)
    return (key <= query) & (query - key < window)


def canvas(prefix_len: int, canvas_len: int, window: int | None = None) -> Tensor:
    """A canvas sees itself, wholly, and the same prefix from each row; ``[canvas, prefix + canvas] bool``.

    With a window that is the last ``window - 1`` positions of the prefix: a rectangle, not a band.
    """
    key = torch.arange(prefix_len + canvas_len)
    start = 0 if window is None else prefix_len + 1 - window
    return (key >= start).expand(canvas_len, -1)


def full_ends(positions: Tensor, length: int) -> Tensor:
    """Visible ends of `full`."""
    return torch.full_like(positions, length)


def causal_ends(positions: Tensor) -> Tensor:
    """Visible ends of `causal`."""
    return positions + 1


def block_causal_ends(positions: Tensor, block_size: int, origin: int = 0) -> Tensor:
    """Visible ends of `block_causal`."""
    return (_block(positions, block_size, origin) + 1) * block_size + origin


def d2f_ends(positions: Tensor, prompt_len: int, block_size: int, origin: int | None = None) -> Tensor:
    """Visible ends of `d2f`."""
    ends = block_causal_ends(positions, block_size, prompt_len if origin is None else origin)
    return torch.where(positions < prompt_len, torch.full_like(positions, prompt_len), ends)


def mask_of(visible_ends: Tensor, num_keys: int, visible_starts: Tensor | None = None) -> Tensor:
    """The boolean matrix ``[L, num_keys]`` that visible ends, and starts where there are any, stand for."""
    keys = torch.arange(num_keys, device=visible_ends.device)
    mask = keys[None, :] < visible_ends[:, None]
    return mask if visible_starts is None else mask & (keys[None, :] >= visible_starts[:, None])


def _grid(length: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length)
    return positions[:, None], positions[None, :]


def _block(positions: Tensor, block_size: int, origin: int) -> Tensor:
    return torch.div(positions - origin, block_size, rounding_mode="floor")
