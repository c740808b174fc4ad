"""Rotary position embedding in the half-split layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Angles of the rows of one forward, ``[T, 1, rotary_dim]`` each.

    `cos` and `signed_sin` are repeated for both halves, with the sign of the first half's sine turned: a head
    ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``.
    """

    cos: Tensor
    signed_sin: Tensor


class RotaryEmbedding:
    """Makes the rotation of a forward once, for all its layers.

    Args:
        rotary_dim: width that is rotated, even.
        theta: base of the frequencies.
        num_frequencies: so many of the ``rotary_dim / 2`` frequencies turn anything, the others are zero
            (the proportional kind); None: all.
    """

    def __init__(self, rotary_dim: int, theta: float, num_frequencies: int | None = None) -> None:
        self.rotary_dim = rotary_dim
        self.theta = theta
        self.num_frequencies = num_frequencies
        self._inverse_frequencies: Tensor | None = None

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation by absolute positions ``[T]``; angles in float32, cosine and sine cast to `dtype`."""
        frequencies = self._inverse_frequencies
        if frequencies is None or frequencies.device != positions.device:
            exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=positions.device)
            frequencies = 1.0 / self.theta ** (exponents / self.rotary_dim)
            if self.num_frequencies is not None:
                frequencies[self.num_frequencies :] = 0.0
            self._inverse_frequencies = frequencies
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            torch.cat([cos, cos], dim=-1).to(dtype).unsqueeze(1),
            torch.cat([-sin, sin], dim=-1).to(dtype).unsqueeze(1),
        )


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Heads ``[T, H, D]`` turned by the angle of their row, as far as the rotation is wide.

    Dimensions behind the rotary ones stay as they are. Computed in the wider of both dtypes.
    """
    width = rotation.cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], rotation), x[..., width:]], dim=-1)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * rotation.cos, swapped, rotation.signed_sin).to(x.dtype)
