"""One DiffusionGemma layer: attention between two norms, then a dense MLP beside routed experts.

Used by `diffusion_gemma.py`. Axes: T packed rows, E experts, I width of an expert, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from diffulex.attention.layer import Attention
from diffulex.layer.activation import gelu_tanh_and_multiply
from diffulex.layer.linear import MergedColumnLinear, RowLinear
from diffulex.layer.norm import RMSNorm, plain_rms_norm
from diffulex.layer.rotary import Rotation, rotate
from diffulex.layer.weights import WeightSlot, prefixed, vector
from diffulex.model.diffusion_gemma_experts import GemmaExperts, GemmaRouter

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.distributed.state import ParallelState
    from diffulex.model.diffusion_gemma_config import DiffusionGemmaConfig, GemmaLayerShape

#: The norms of a layer, as the checkpoint calls them.
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
    "post_feedforward_layernorm",
)


class GemmaAttention(nn.Module):
    """Attention with scale 1; values are normalised without a weight.

    A layer that sees everything has no value projection: its values are the raw keys, normalised and not
    rotated.
    """

    def __init__(
        self,
        config: DiffusionGemmaConfig,
        shape: GemmaLayerShape,
        dtype: torch.dtype,
        parallel: ParallelState,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.head_dim = shape.head_dim
        self.num_heads = parallel.share(config.num_heads, "number of attention heads")
        self.num_kv_heads = parallel.share(shape.num_kv_heads, "number of key/value heads")
        query_width, kv_width = config.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {"q": query_width, "k": kv_width}
        if shape.window is not None:
            parts["v"] = kv_width
        self.qkv = MergedColumnLinear(config.hidden_size, parts, dtype=dtype, parallel=parallel)
        self.output = RowLinear(query_width, config.hidden_size, dtype=dtype, parallel=parallel)
        self.q_norm = RMSNorm(shape.head_dim, self.eps, dtype=dtype)
        self.k_norm = RMSNorm(shape.head_dim, self.eps, dtype=dtype)
        self.attention = Attention(self.num_heads, self.num_kv_heads, shape.head_dim, 1.0, shape.window)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """``[T, H] -> [T, H]``."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query = heads[:, : self.num_heads]
        key = heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
        value = plain_rms_norm(heads[:, -self.num_kv_heads :], self.eps)
        query, key = rotate(self.q_norm(query), rotation), rotate(self.k_norm(key), rotation)
        out: Tensor = self.output(self.attention(query, key, value).flatten(1))
        return out

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's names behind ``self_attn``."""
        fused = self.qkv.weight_slots()
        return {
            **{f"{name.replace('.', '_proj.')}": slot for name, slot in fused.items()},
            **prefixed("o_proj", self.output.weight_slots()),
            **prefixed("q_norm", self.q_norm.weight_slots()),
            **prefixed("k_norm", self.k_norm.weight_slots()),
        }


class GemmaMLP(nn.Module):
    """``down(gelu(gate(x)) * up(x))`` with gate and up fused."""

    def __init__(self, config: DiffusionGemmaConfig, dtype: torch.dtype, parallel: ParallelState) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_up = MergedColumnLinear(
            hidden, {"gate": width, "up": width}, dtype=dtype, parallel=parallel
        )
        self.down = RowLinear(width, hidden, dtype=dtype, parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, H] -> [T, H]``."""
        out: Tensor = self.down(gelu_tanh_and_multiply(self.gate_up(x)))
        return out

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``gate_proj.weight``, ``up_proj.weight`` and ``down_proj.weight``."""
        fused = self.gate_up.weight_slots()
        return {
            "gate_proj.weight": fused["gate.weight"],
            "up_proj.weight": fused["up.weight"],
            **prefixed("down_proj", self.down.weight_slots()),
        }


class GemmaLayer(nn.Module):
    """Norms before and after each part, and one factor on the whole stream at the end.

    That factor is all in which the pass that encodes differs from the pass that denoises a canvas.
    """

    def __init__(
        self,
        config: DiffusionGemmaConfig,
        shape: GemmaLayerShape,
        dtype: torch.dtype,
        parallel: ParallelState,
    ) -> None:
        super().__init__()
        self.rope = shape.rope
        self.attention = GemmaAttention(config, shape, dtype, parallel)
        self.mlp = GemmaMLP(config, dtype, parallel)
        self.router = GemmaRouter(config, dtype)
        self.experts = GemmaExperts(
            config.num_experts, config.hidden_size, config.expert_size, dtype=dtype, parallel=parallel
        )
        self.norms = nn.ModuleDict(
            {name: RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype) for name in _NORMS}
        )
        self.encode_scalar = vector(1, dtype)
        self.canvas_scalar = vector(1, dtype)

    def forward(self, x: Tensor, rotation: Rotation, is_canvas: Tensor | bool) -> Tensor:
        """``[T, H] -> [T, H]``; `is_canvas`, ``[T] bool`` or one truth for all rows, chooses the factor."""
        norms = self.norms
        attended = self.attention(norms["input_layernorm"](x), rotation)
        x = x + norms["post_attention_layernorm"](attended)
        dense = norms["post_feedforward_layernorm_1"](self.mlp(norms["pre_feedforward_layernorm"](x)))
        routed = self.experts(norms["pre_feedforward_layernorm_2"](x), self.router(x)).to(x.dtype)
        routed = norms["post_feedforward_layernorm_2"](routed)
        x = x + norms["post_feedforward_layernorm"](dense + routed)
        return x * self._scalar(is_canvas)

    def _scalar(self, is_canvas: Tensor | bool) -> Tensor:
        if isinstance(is_canvas, bool):
            return self.canvas_scalar if is_canvas else self.encode_scalar
        return torch.where(is_canvas.unsqueeze(-1), self.canvas_scalar, self.encode_scalar)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's names behind the layer's number, the two factors left out."""
        slots = {
            **prefixed("self_attn", self.attention.weight_slots()),
            **prefixed("mlp", self.mlp.weight_slots()),
            **prefixed("router", self.router.weight_slots()),
            **prefixed("experts", self.experts.weight_slots()),
        }
        for name in _NORMS:
            norm = self.norms[name]
            assert isinstance(norm, RMSNorm)
            slots |= prefixed(name, norm.weight_slots())
        return slots
