"""The decoder that every dense family shares; a family states its configuration and what differs.

Called by `loader.py`, which fills the weights, and by the model runner, which runs it over packed rows.
Axes: T packed rows of all requests, Hq / Hk heads of this process, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import torch
from torch import nn

from diffulex.attention.layer import Attention
from diffulex.distributed.state import SINGLE, ParallelState
from diffulex.layer.activation import silu_and_multiply
from diffulex.layer.embedding import OutputHead, VocabEmbedding
from diffulex.layer.linear import MergedColumnLinear, QKVLinear, RowLinear
from diffulex.layer.norm import RMSNorm
from diffulex.layer.rotary import RotaryEmbedding, Rotation, rotate
from diffulex.layer.weights import WeightSlot, joined, prefixed
from diffulex.model.config_reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from diffulex.utils.checkpoint import CheckpointFacts


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a dense decoder, as a family reads it from config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    rope_in_float32: bool = False
    #: Width of a head that is rotated; None is all of it.
    rotary_dim: int | None = None
    #: See `RMSNorm`.
    norm_rounds_before_weight: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """What a family calls its tensors in a checkpoint; parts of a layer stand behind `layer`."""

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    #: One tensor with the rows of q, k and v in that order, in place of the three.
    qkv: str | None = None
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


def _norm(size: int, config: DecoderConfig, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(
        size, config.rms_norm_eps, dtype=dtype, rounds_before_weight=config.norm_rounds_before_weight
    )


class SelfAttention(nn.Module):
    """Fused q/k/v, an optional norm of each head before the rotation, attention, output projection."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, parallel: ParallelState) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = QKVLinear(
            config.hidden_size,
            heads,
            kv_heads,
            head_dim,
            bias=config.qkv_bias,
            dtype=dtype,
            parallel=parallel,
        )
        self.output = RowLinear(
            heads * head_dim, config.hidden_size, bias=config.output_bias, dtype=dtype, parallel=parallel
        )
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        self.head_dim = head_dim
        self.q_norm = _norm(head_dim, config, dtype) if config.qk_norm else None
        self.k_norm = _norm(head_dim, config, dtype) if config.qk_norm else None
        self.attention = Attention(self.num_heads, self.num_kv_heads, head_dim, head_dim**-0.5)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = self.attention(rotate(query, rotation), rotate(key, rotation), value)
        out: Tensor = self.output(attended.flatten(1))
        return out

    def weight_slots(self, names: DecoderNames) -> dict[str, WeightSlot]:
        """Slots by the family's names."""
        apart = self.qkv.weight_slots()
        if names.qkv is None:
            parts = {"q": names.q, "k": names.k, "v": names.v}
            split = ((name.split("."), slot) for name, slot in apart.items())
            slots = {f"{parts[part]}.{kind}": slot for (part, kind), slot in split}
        else:
            fused = {"weight": self.qkv.weight, "bias": self.qkv.bias}
            slots = {
                f"{names.qkv}.{kind}": joined(whole.data, [apart[f"{part}.{kind}"] for part in "qkv"])
                for kind, whole in fused.items()
                if whole is not None
            }
        slots |= prefixed(names.output, self.output.weight_slots())
        if self.q_norm is not None and self.k_norm is not None:
            slots |= prefixed(names.q_norm, self.q_norm.weight_slots())
            slots |= prefixed(names.k_norm, self.k_norm.weight_slots())
        return slots


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up fused."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, parallel: ParallelState) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_up = MergedColumnLinear(
            hidden, {"gate": width, "up": width}, dtype=dtype, parallel=parallel
        )
        self.down = RowLinear(width, hidden, dtype=dtype, parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        out: Tensor = self.down(silu_and_multiply(self.gate_up(x)))
        return out

    def weight_slots(self, names: DecoderNames) -> dict[str, WeightSlot]:
        """Slots by the family's names."""
        fused = self.gate_up.weight_slots()
        return {
            f"{names.gate}.weight": fused["gate.weight"],
            f"{names.up}.weight": fused["up.weight"],
            **prefixed(names.down, self.down.weight_slots()),
        }


class LayerMLP(Protocol):
    """What stands behind the second norm of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        ...

    def weight_slots(self, names: DecoderNames) -> dict[str, WeightSlot]:
        """Slots by the family's names."""
        ...


class DecoderLayer(nn.Module):
    """Pre-norm residual block: attention, then `mlp`, which is a `GatedMLP` unless another is given."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        parallel: ParallelState,
        mlp: LayerMLP | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = _norm(config.hidden_size, config, dtype)
        self.attention = SelfAttention(config, dtype, parallel)
        self.mlp_norm = _norm(config.hidden_size, config, dtype)
        self.mlp: LayerMLP = GatedMLP(config, dtype, parallel) if mlp is None else mlp

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def weight_slots(self, names: DecoderNames) -> dict[str, WeightSlot]:
        """Slots by the family's names, without the layer's own prefix."""
        return {
            **prefixed(names.attention_norm, self.attention_norm.weight_slots()),
            **prefixed(names.mlp_norm, self.mlp_norm.weight_slots()),
            **self.attention.weight_slots(names),
            **self.mlp.weight_slots(names),
        }


class DiffusionLM(nn.Module):
    """A diffusion language model over packed rows; the base of every family.

    Made by `load_model`, run by the model runner. What a row sees is not the model's business: its attention
    layers take that from the metadata of the forward.
    """

    #: `model_type` and `architectures` values of checkpoints that this family reads.
    model_types: ClassVar[frozenset[str]] = frozenset()
    architectures: ClassVar[frozenset[str]] = frozenset()
    #: What the family calls its tensors.
    names: ClassVar[DecoderNames] = DecoderNames()
    #: For keys that config.json lacks. None: head_dim is hidden_size / heads, the others must be there.
    default_head_dim: ClassVar[int | None] = None
    default_rope_theta: ClassVar[float | None] = None
    default_rms_norm_eps: ClassVar[float | None] = None
    #: Endings of tensor names that old checkpoints carry and nobody needs.
    ignored_suffixes: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    #: Beginnings of tensor names of parts that are not built, such as an image encoder.
    ignored_prefixes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, parallel: ParallelState = SINGLE
    ) -> None:
        super().__init__()
        self.config = config
        self.num_layers = config.num_layers
        self.num_kv_heads = parallel.share(config.num_kv_heads, "number of key/value heads")
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.dtype = dtype
        self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, dtype=dtype, parallel=parallel)
        self.rotary = RotaryEmbedding(config.rotary_dim or config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(
            self.make_layer(config, layer_id, dtype, parallel) for layer_id in range(config.num_layers)
        )
        self.final_norm = _norm(config.hidden_size, config, dtype)
        self.head = OutputHead(config.vocab_size, config.hidden_size, dtype=dtype, parallel=parallel)
        if config.tie_word_embeddings:
            self.head.tie(self.embedding)

    @classmethod
    def recognises(cls, facts: CheckpointFacts) -> bool:
        """Whether config.json says that the checkpoint is of this family."""
        return facts.model_type in cls.model_types or not cls.architectures.isdisjoint(facts.architectures)

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DecoderConfig:
        """The shape that config.json states under the usual Hugging Face keys.

        `tensor_names` are the names in the weight files: a head that is there is used even where config.json
        says that it is tied.
        """
        reader = ConfigReader(facts)
        hidden_size, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
        num_kv_heads = reader.count("num_key_value_heads")
        is_tied = reader.flag("tie_word_embeddings", False)
        config = DecoderConfig(
            vocab_size=reader.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size"),
            num_layers=reader.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=reader.count("head_dim", cls.default_head_dim or hidden_size // num_heads),
            rms_norm_eps=reader.number("rms_norm_eps", cls.default_rms_norm_eps),
            rope_theta=reader.rope_theta(cls.default_rope_theta),
            tie_word_embeddings=is_tied and f"{cls.names.head}.weight" not in tensor_names,
        )
        reader.expect("hidden_act", "silu")
        reader.expect("use_sliding_window", False)
        reader.words("layer_types", {"full_attention"}, ())
        reader.check(config.head_dim % 2 == 0, f"head_dim must be even, it is {config.head_dim}")
        reader.check(
            num_heads % num_kv_heads == 0,
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})",
        )
        reader.finish()
        return config

    @classmethod
    def from_facts(
        cls,
        facts: CheckpointFacts,
        tensor_names: Collection[str],
        *,
        dtype: torch.dtype,
        parallel: ParallelState = SINGLE,
    ) -> Self:
        """The network of a checkpoint, its weights not yet filled."""
        return cls(cls.read_config(facts, tensor_names), dtype=dtype, parallel=parallel)

    def make_layer(
        self,
        config: DecoderConfig,
        layer_id: int,  # noqa: ARG002 (families with layers of several kinds read it)
        dtype: torch.dtype,
        parallel: ParallelState,
    ) -> nn.Module:
        """The layer of that number, its weights not yet filled; here all are alike."""
        return DecoderLayer(config, dtype, parallel)

    def forward(self, input_ids: Tensor, positions: Tensor, embeds: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: ``[T] int64``.
            positions: ``[T] int64``, absolute.
            embeds: ``[T, hidden]`` to use in place of the embedding of `input_ids`.

        Returns:
            ``[T, hidden]``.
        """
        x = self.embedding(input_ids) if embeds is None else embeds
        rotation = self.rotary.rotation(positions, torch.float32 if self.config.rope_in_float32 else x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        hidden: Tensor = self.final_norm(x)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[N, hidden] -> [N, vocab_size]`` in the model's dtype; row i scores as the family defines it."""
        logits: Tensor = self.head(hidden)
        return logits

    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def attention_layers(self) -> list[Attention]:
        """The attention layers in the order of the layers."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def ignores(self, tensor_name: str) -> bool:
        """Whether a checkpoint may hold a tensor of that name although nobody needs it."""
        return tensor_name.endswith(self.ignored_suffixes) or tensor_name.startswith(self.ignored_prefixes)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the checkpoint must hold, by the checkpoint's name; no head when it is tied."""
        slots = prefixed(self.names.embedding, self.embedding.weight_slots())
        for layer_id, layer in enumerate(self.decoder_layers()):
            slots |= prefixed(self.names.layer.format(layer_id), layer.weight_slots(self.names))
        slots |= prefixed(self.names.final_norm, self.final_norm.weight_slots())
        if not self.config.tie_word_embeddings:
            slots |= prefixed(self.names.head, self.head.weight_slots())
        return slots
