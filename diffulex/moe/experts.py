"""The experts of one layer: their stacked weights, where a checkpoint's tensors go, what they compute.

Axes: T packed rows, E experts, K chosen ones, H hidden size, I width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from diffulex.distributed.collectives import all_reduce
from diffulex.layer.activation import silu_and_multiply
from diffulex.layer.weights import WeightSlot
from diffulex.moe.dispatch import dispatch
from diffulex.moe.ops.grouped_gemm import grouped_gemm

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.distributed.state import ParallelState
    from diffulex.moe.router import Routing


class Experts(nn.Module):
    """E gated MLPs ``down(silu(gate(x)) * up(x))``; of the width of each this process holds its share.

    `gemm_impl` and `dispatcher` say how they are computed; `use_forms` of `block.py` sets them.

    Args:
        num_experts, hidden_size, expert_size: E, H and I over all processes.
        is_stacked: the checkpoint holds one tensor for all experts of a layer in place of one for each.
        dtype: of the weights.
        parallel: divides the width of every expert.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        is_stacked: bool = False,
        dtype: torch.dtype,
        parallel: ParallelState,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.expert_size = expert_size
        self.is_stacked = is_stacked
        self.parallel = parallel
        self.gemm_impl = "naive"
        self.dispatcher = "standard"
        local = parallel.share(expert_size, "width of an expert")
        # Gate above up. Rows stay in order: an expert sees too few rows for the column order to win.
        self.gate_up = nn.Parameter(
            torch.empty(num_experts, 2 * local, hidden_size, dtype=dtype), requires_grad=False
        )
        self.down = nn.Parameter(
            torch.empty(num_experts, hidden_size, local, dtype=dtype), requires_grad=False
        )

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Weighted sum of the chosen experts' results in float32: ``[T, H] -> [T, H]``."""
        places = dispatch(routing, self.num_experts, self.dispatcher)
        gate_up = grouped_gemm(places.gather(x), self.gate_up, places, self.gemm_impl)
        results = grouped_gemm(self.activate(gate_up), self.down, places, self.gemm_impl)
        return all_reduce(places.combine(results, routing.weights), self.parallel)

    def activate(self, gate_up: Tensor) -> Tensor:
        """``[N, 2 * I] -> [N, I]``, gate before up; families with another gate override it."""
        return silu_and_multiply(gate_up)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``<e>.gate_proj.weight`` and so on for each expert, or stacked ``gate_proj`` for all of them."""
        gate, up = self.gate_up.data.chunk(2, dim=1)
        wide, tall = (self.expert_size, self.hidden_size), (self.hidden_size, self.expert_size)
        start = self.parallel.rank * self.down.shape[2]
        parts = (
            ("gate_proj", gate, wide, 0),
            ("up_proj", up, wide, 0),
            ("down_proj", self.down.data, tall, 1),
        )
        if self.is_stacked:
            return {
                part: WeightSlot(target, (self.num_experts, *shape), dim + 1, start)
                for part, target, shape, dim in parts
            }
        return {
            f"{expert}.{part}.weight": WeightSlot(target[expert], shape, dim, start)
            for expert in range(self.num_experts)
            for part, target, shape, dim in parts
        }
