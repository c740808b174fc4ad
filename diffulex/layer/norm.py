"""Root mean square normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import rms_norm

from diffulex.layer.weights import WeightSlot, vector, whole

if TYPE_CHECKING:
    from torch import Tensor


def plain_rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, a norm without a weight; in the dtype of `x`."""
    return rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    Mean, root and the product with the weight run in float32 and are rounded once, as the fused training
    kernels do. With `rounds_before_weight` the product runs in the dtype of the input instead, so that a
    narrow one rounds twice; in float32 both are the same.
    """

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, rounds_before_weight: bool = False
    ) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps
        self.rounds_before_weight = rounds_before_weight
        self.weight = vector(size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]``, in the dtype of `x`."""
        if x.dtype == torch.float32:
            return rms_norm(x, self.size, self.weight, self.eps)
        if self.rounds_before_weight:
            return plain_rms_norm(x, self.eps) * self.weight
        return rms_norm(x.float(), self.size, self.weight.float(), self.eps).to(x.dtype)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``weight``."""
        return {"weight": whole(self.weight)}
