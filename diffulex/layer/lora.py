"""Low-rank adapters: added to a weight for good, or computed beside a linear layer in each forward.

``y = W x + scale * B (A x)``. The linear layers of this package are `AdaptableLinear`; the model loader
brings the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diffulex.layer.weights import WeightSlot


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The adapter of one checkpoint weight ``[out, in]``: `a` ``[r, in]``, `b` ``[out, r]``, float32."""

    a: Tensor
    b: Tensor
    scale: float

    def merged_into(self, weight: Tensor) -> Tensor:
        """The weight with the adapter in it, in float32: the caller rounds once."""
        return weight.float().addmm(self.b, self.a, alpha=self.scale)

    def attach(self, slot: WeightSlot) -> None:
        """The layer of `slot` computes the adapter from now on."""
        slot.attach(self.a, self.b * self.scale)


class LoraBranch(nn.Module):
    """What is added to a linear layer ``[out, in]``, made when its first part gets an adapter.

    A layer may hold several weights of a checkpoint above each other. All their `a` are stacked and each `b`
    stands in its own rows and columns, so that two products serve all parts.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)
        self.b = nn.Parameter(weight.new_empty(weight.shape[0], 0), requires_grad=False)

    def add_part(self, first_row: int, a: Tensor, b: Tensor) -> None:
        """The output rows from `first_row` on get the adapter `a`, `b`, scale included."""
        columns = self.b.new_zeros(self.b.shape[0], b.shape[1])
        columns[first_row : first_row + b.shape[0]] = b
        self.a = nn.Parameter(torch.cat([self.a, a]), requires_grad=False)
        self.b = nn.Parameter(torch.cat([self.b, columns], dim=1), requires_grad=False)

    def forward(self, product: Tensor, x: Tensor) -> Tensor:
        """`product` ``[T, out]`` of `x` ``[T, in]``, changed in place."""
        return product.addmm_(linear(x, self.a), self.b.t())


class AdaptableLinear(nn.Module):
    """Base of the linear layers: the product with `weight` and, where there are any, with adapters."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.lora: LoraBranch | None = None

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[T, in] -> [T, out]``."""
        product = linear(x, self.weight, bias)
        if self.lora is None:
            return product
        out: Tensor = self.lora(product, x)
        return out

    def adapt(self, first_row: int = 0) -> Callable[[Tensor, Tensor], None]:
        """What takes the adapter of the weight that lies from `first_row` on."""
        return partial(self._add_part, first_row)

    def _add_part(self, first_row: int, a: Tensor, b: Tensor) -> None:
        if self.lora is None:
            self.lora = LoraBranch(self.weight)
        self.lora.add_part(first_row, a, b)
