"""The network that is trained: a Qwen3-like decoder whose weight names are those SDAR publishes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from diffulex_bench.tiny.recipe import NetworkShape

# Axes: B rows, T tokens, H hidden, N query heads, K key heads, D head width, V vocabulary.

Visibility = Tensor | BlockMask


class RMSNorm(nn.Module):
    """Root mean square norm in float32; the weight is multiplied after."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed input in its own dtype."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return scaled.to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped attention with normed queries and keys and rotary positions."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Visibility) -> Tensor:
        """Return ``[B, T, H]``; ``visible`` is a dense mask or a block mask over the T tokens."""
        num_rows, num_tokens, _ = x.shape
        heads = (num_rows, num_tokens, -1, self.head_dim)
        q = _rotated(self.q_norm(self.q_proj(x).view(heads)), cos, sin).transpose(1, 2)
        k = _rotated(self.k_norm(self.k_proj(x).view(heads)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if isinstance(visible, Tensor):
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        else:
            flexible = flex_attention(q, k, v, block_mask=visible, enable_gqa=True)
            assert isinstance(flexible, Tensor)
            mixed = flexible
        return self.o_proj(mixed.transpose(1, 2).reshape(num_rows, num_tokens, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, H]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm residual layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Visibility) -> Tensor:
        """Return ``[B, T, H]``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, visible)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers and last norm, under the published names below ``model.``."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Network(nn.Module):
    """The whole network with a tied head; `state_dict` has exactly the published names."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.num_layers) if ends_branch else 0.02)

    def forward(self, ids: Tensor, positions: Tensor, visible: Visibility) -> Tensor:
        """Return the last hidden states ``[B, T, H]`` of ``ids`` and ``positions``, both ``[B, T]``."""
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = _angles(positions, self.shape, x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, visible)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[..., V]`` scores of hidden states ``[..., H]``."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def dense_visibility(problem: Tensor, block: Tensor, group: Tensor, clean_end: Tensor) -> Tensor:
    """Return the rule of `rows` as a mask ``[B, 1, T, T]``, true where q sees k; arguments ``[B, T]``."""
    q, k = slice(None), None
    same = problem[:, q, k] == problem[:, k, q]
    is_clean = group[:, k, q] < 0
    sees_clean = block[:, k, q] < clean_end[:, q, k]
    sees_noisy = (group[:, k, q] == group[:, q, k]) & (block[:, k, q] <= block[:, q, k])
    return (same & torch.where(is_clean, sees_clean, sees_noisy))[:, None]


def block_visibility(problem: Tensor, block: Tensor, group: Tensor, clean_end: Tensor) -> BlockMask:
    """Return the same rule as a block mask for compiled attention on a CUDA device."""

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        sees_noisy = (group[b, k] == group[b, q]) & (block[b, k] <= block[b, q])
        seen = torch.where(group[b, k] < 0, block[b, k] < clean_end[b, q], sees_noisy)
        return (problem[b, q] == problem[b, k]) & seen

    num_rows, num_tokens = problem.shape
    return create_block_mask(visible, num_rows, None, num_tokens, num_tokens, device=str(problem.device))


def block_causal_visibility(num_tokens: int, block_size: int, device: torch.device) -> Tensor:
    """Return ``[T, T]``: position q sees k when k's block is not after q's; the mask of decoding."""
    block = torch.arange(num_tokens, device=device) // block_size
    return block[:, None] >= block[None, :]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _angles(positions: Tensor, shape: NetworkShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine ``[B, T, 1, D]`` of each position, half-split layout."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
    angles = positions[..., None].float() * shape.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)
