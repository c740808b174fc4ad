"""Gated activations of fused projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import gelu, silu

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 * n]``, gate before up; ``[T, n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def gelu_tanh_and_multiply(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``[T, 2 * n]`` with the tanh form of gelu, gate before up; ``[T, n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)
