"""DiffusionGemma's expert layer: how its router scores, and how a checkpoint stacks its experts.

Used by `diffusion_gemma_layer.py`. Axes: T packed rows, E experts, K chosen ones, I width of an expert,
H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import linear

from diffulex.layer.activation import gelu_tanh_and_multiply
from diffulex.layer.norm import plain_rms_norm
from diffulex.layer.weights import WeightSlot, matrix, vector, whole
from diffulex.moe.experts import Experts
from diffulex.moe.router import RouterSpec, Routing, choose_experts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from diffulex.model.diffusion_gemma_config import DiffusionGemmaConfig


class GemmaRouter(nn.Module):
    """Scores rows after a norm of its own; every process holds it whole.

    The weights of the chosen experts are made to sum to 1, then each is multiplied by its expert's factor.
    """

    def __init__(self, config: DiffusionGemmaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = RouterSpec(
            num_experts=config.num_experts,
            num_chosen=config.num_chosen_experts,
            scoring="softmax",
            normalise=True,
        )
        self.eps = config.rms_norm_eps
        self.root = config.hidden_size**-0.5
        self.proj = matrix(config.num_experts, config.hidden_size, dtype)
        self.scale = vector(config.hidden_size, dtype)
        self.per_expert_scale = vector(config.num_experts, dtype)

    def forward(self, x: Tensor) -> Routing:
        """Choice for rows ``[T, H]``."""
        logits = linear(plain_rms_norm(x, self.eps) * self.scale * self.root, self.proj)
        expert_ids, weights = choose_experts(logits, self.spec)
        return Routing(expert_ids, weights * self.per_expert_scale[expert_ids])

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``proj.weight``, ``scale`` and ``per_expert_scale``."""
        return {
            "proj.weight": whole(self.proj),
            "scale": whole(self.scale),
            "per_expert_scale": whole(self.per_expert_scale),
        }


class GemmaExperts(Experts):
    """E gated MLPs with gelu."""

    def activate(self, gate_up: Tensor) -> Tensor:
        """``[N, 2 * I] -> [N, I]``."""
        return gelu_tanh_and_multiply(gate_up)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``gate_up_proj`` and ``down_proj`` for all experts, without a ``.weight`` behind them."""
        num_experts, hidden, local = self.down.shape
        start = self.parallel.rank * local
        halves = self.gate_up.data.view(num_experts, 2, local, hidden)
        return {
            "gate_up_proj": _GateUpSlot(halves, (num_experts, 2 * self.expert_size, hidden), start=start),
            "down_proj": WeightSlot(self.down.data, (num_experts, hidden, self.expert_size), 2, start),
        }


@dataclass(frozen=True, slots=True)
class _GateUpSlot(WeightSlot):
    """Takes ``[E, 2 * I, H]``, gate before up, into a target ``[E, 2, local I, H]``."""

    def load(self, tensor: Tensor) -> None:
        """Copy this process's rows of both halves."""
        halves = tensor.view(tensor.shape[0], 2, -1, tensor.shape[2])
        self.target.copy_(halves.narrow(2, self.start, self.target.shape[2]))
