"""What a grouped product means, in torch; serves the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def multiply_segments(x: Tensor, weights: Tensor, segments: Sequence[tuple[int, int, int]]) -> Tensor:
    """``out[start:stop] = x[start:stop] @ weights[e].T`` for each segment ``(e, start, stop)``.

    The segments cover all rows. Matrices of groups without rows are not read.
    """
    out = x.new_empty(x.shape[0], weights.shape[1])
    for group, start, stop in segments:
        torch.mm(x[start:stop], weights[group].t(), out=out[start:stop])
    return out
