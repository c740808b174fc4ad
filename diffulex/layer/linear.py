"""Linear layers, whole or divided among the processes of a tensor-parallel group.

Column-parallel layers hold rows of the weight (output features), row-parallel layers hold columns (input
features) and add up their results. Projections with the same input are fused into one product; each keeps
a weight slot of its own, so that a checkpoint may name them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.distributed.collectives import all_reduce
from diffulex.distributed.state import SINGLE, ParallelState
from diffulex.layer.lora import AdaptableLinear
from diffulex.layer.weights import WeightSlot, matrix, vector

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor


class MergedColumnLinear(AdaptableLinear):
    """Several projections of one input, computed as one: ``[T, in] -> [T, sum of local outputs]``.

    Args:
        in_features: width of the input.
        out_features: name of each part -> its width over all processes, in the order of the result.
        bias: whether each part has a bias.
        dtype: of the weights.
        parallel: each part is divided evenly among its processes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        parallel: ParallelState = SINGLE,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = dict(out_features)
        self.parallel = parallel
        self.local_sizes = [
            parallel.share(size, f"width of {part}") for part, size in self.out_features.items()
        ]
        total = sum(self.local_sizes)
        self.weight = matrix(total, in_features, dtype)
        self.bias = vector(total, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The parts of this process side by side."""
        return self.multiply(x, self.bias)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``<part>.weight`` and, with a bias, ``<part>.bias``."""
        slots: dict[str, WeightSlot] = {}
        offset = 0
        for (part, size), local in zip(self.out_features.items(), self.local_sizes, strict=True):
            start = self.parallel.rank * local
            rows = slice(offset, offset + local)
            slots[f"{part}.weight"] = WeightSlot(
                self.weight.data[rows], (size, self.in_features), 0, start, adapt=self.adapt(offset)
            )
            if self.bias is not None:
                slots[f"{part}.bias"] = WeightSlot(self.bias.data[rows], (size,), 0, start)
            offset += local
        return slots


class QKVLinear(MergedColumnLinear):
    """Queries, keys and values of one input; parts ``q``, ``k``, ``v``, divided by whole heads."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        parallel: ParallelState = SINGLE,
    ) -> None:
        self.num_heads = parallel.share(num_heads, "number of attention heads")
        self.num_kv_heads = parallel.share(num_kv_heads, "number of key/value heads")
        widths = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        super().__init__(hidden_size, widths, bias=bias, dtype=dtype, parallel=parallel)


class RowLinear(AdaptableLinear):
    """A projection whose input is divided: ``[T, local in] -> [T, out]``, summed over the group."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        parallel: ParallelState = SINGLE,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.parallel = parallel
        local = parallel.share(in_features, "width of the input")
        self.weight = matrix(out_features, local, dtype)
        self.bias = vector(out_features, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The whole product; the bias is added once, by rank 0."""
        return all_reduce(self.multiply(x, self.bias if self.parallel.rank == 0 else None), self.parallel)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``weight`` and, with a bias, ``bias``."""
        start = self.parallel.rank * self.weight.shape[1]
        shape = (self.out_features, self.in_features)
        slots = {"weight": WeightSlot(self.weight.data, shape, 1, start, adapt=self.adapt())}
        if self.bias is not None:
            slots["bias"] = WeightSlot(self.bias.data, (self.out_features,))
        return slots
