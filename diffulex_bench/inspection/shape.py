"""The shape of a network and its size, from config.json and the headers of the weights, for every family.

Tensors tell more than keys, which differ from family to family: where both speak they must agree.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from diffulex.utils.special_ids import as_token_id, config_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diffulex.utils.weight_files import TensorHeader

__all__ = ["CacheLayer", "ModelShape", "ModelSize", "measure", "read_shape"]

_LAYER = re.compile(
    r"^model\.(?:decoder\.|encoder\.language_model\.)?(?:layers|transformer\.blocks)\.(\d+)\.(.+)$"
)
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "transformer.wte.weight")
_HEADS = ("lm_head.weight", "model.transformer.ff_out.weight")
_SKIPPED = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
_KEY_NORMS = ("self_attn.k_norm.weight", "attention.key_layernorm.weight")
_KEYS = ("self_attn.k_proj.weight", "k_proj.weight")
_ROUTERS = ("mlp.gate.weight", "router.proj.weight")
_FUSED = "attention.query_key_value.weight"
#: Of every kind of number in a safetensors file that weights are stored as.
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


class CacheLayer(NamedTuple):
    """Keys of one layer, and as many values: heads and their width."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What is known of a network; None where no file says it.

    `layers` has one entry a layer, none when heads or widths are unknown. `head` says where the output matrix
    comes from, `experts` how many experts a routed layer has and how many of them a token visits.
    """

    num_layers: int | None
    hidden_size: int | None
    num_heads: int | None
    layers: tuple[CacheLayer, ...]
    embedding_rows: int | None
    is_tied: bool
    head: str
    experts: tuple[int, int] | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of the weight files.

    `by_dtype` maps the name of a number format in the files to (parameters, bytes), `active` are those one
    token meets, embedding and output matrix included, `skipped` those of parts that no text engine reads, and
    `split` those that tensor parallel ranks divide among themselves.
    """

    by_dtype: Mapping[str, tuple[int, int]]
    total: int
    active: int
    skipped: int
    split: int

    @property
    def used(self) -> int:
        """Parameters that the engine loads."""
        return self.total - self.skipped

    def bytes_of_rank(self, itemsize: int, num_ranks: int) -> int:
        """Bytes that one of `num_ranks` ranks holds in a number format of `itemsize` bytes."""
        return itemsize * (self.used - self.split + -(-self.split // num_ranks))


def read_shape(
    config: Mapping[str, Any], headers: Mapping[str, TensorHeader], *, is_complete: bool
) -> ModelShape:
    """The shape that `config` and the tensors of `headers` tell; either may be empty.

    `is_complete` says that `headers` are those of all weight files, so that what they lack is not there.
    """
    problems: list[str] = []
    tensors = _layer_tensors(headers)
    num_layers = _agreed(
        "num_hidden_layers",
        _number(config, "num_hidden_layers", "n_layers"),
        max(tensors) + 1 if tensors and is_complete else None,
        problems,
    )
    embedding = next((h.shape for name, h in headers.items() if name.endswith(_EMBEDDINGS)), None)
    hidden_size = _agreed(
        "hidden_size",
        _number(config, "hidden_size", "d_model"),
        embedding[1] if embedding and len(embedding) == 2 else None,
        problems,
    )
    has_head = any(name in headers for name in _HEADS)
    says_tied = bool(config_value(config, "tie_word_embeddings") or config_value(config, "weight_tying"))
    if is_complete and not has_head and not says_tied:
        problems.append("the weights hold no output matrix, yet config.json does not say that it is tied")
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=_number(config, "num_attention_heads", "n_heads"),
        layers=tuple(_cache_layers(config, tensors, num_layers or 0, hidden_size, problems)),
        embedding_rows=embedding[0] if embedding else None,
        is_tied=not has_head and (says_tied or is_complete),
        head=_describe_head(has_head, says_tied, is_complete),
        experts=_experts(config),
        problems=tuple(problems),
    )


def measure(headers: Mapping[str, TensorHeader], experts: tuple[int, int] | None) -> ModelSize:
    """Counts the parameters of all tensors."""
    by_dtype: dict[str, tuple[int, int]] = {}
    total = skipped = routed = split = 0
    for name, header in headers.items():
        count = math.prod(header.shape)
        params, num_bytes = by_dtype.get(header.dtype, (0, 0))
        by_dtype[header.dtype] = (params + count, num_bytes + header.num_bytes)
        if header.dtype not in _FLOATS:
            continue
        total += count
        if name.startswith(_SKIPPED):
            skipped += count
            continue
        routed += count if ".experts." in name else 0
        split += count if len(header.shape) > 1 and not name.endswith(_ROUTERS) else 0
    active = total - skipped
    if experts is not None:
        active -= routed - routed * experts[1] // experts[0]
    return ModelSize(by_dtype, total, active, skipped, split)


def _layer_tensors(headers: Mapping[str, TensorHeader]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Layer -> name within the layer -> shape."""
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, header in headers.items():
        found = _LAYER.match(name)
        if found:
            layers.setdefault(int(found[1]), {})[found[2]] = header.shape
    return layers


def _cache_layers(
    config: Mapping[str, Any],
    tensors: Mapping[int, Mapping[str, tuple[int, ...]]],
    num_layers: int,
    hidden_size: int | None,
    problems: list[str],
) -> Iterator[CacheLayer]:
    """Heads and width of each layer's keys; nothing once a layer's are unknown."""
    # Files of some versions state the heads of each layer in a form of their own; then the tensors decide.
    is_mixed = config_value(config, "per_layer_config") is not None
    for layer_id in range(num_layers):
        stated = _stated_layer(config, layer_id, hidden_size)
        found = _found_layer(tensors.get(layer_id, {}), stated)
        if found is None and stated is None:
            problems.append(
                "neither config.json nor the tensors say how many key/value heads layer "
                f"{layer_id} has and how wide they are"
            )
            return
        if found and stated and found != stated and _number(config, "head_dim") and not is_mixed:
            problems.append(
                f"layer {layer_id} holds {found.num_kv_heads} key/value heads of width {found.head_dim}, "
                f"config.json says {stated.num_kv_heads} of width {stated.head_dim}"
            )
        layer = found or stated
        assert layer is not None
        yield layer


def _stated_layer(config: Mapping[str, Any], layer_id: int, hidden_size: int | None) -> CacheLayer | None:
    heads = _number(config, "num_attention_heads", "n_heads")
    kv_heads = _number(config, "num_key_value_heads", "n_kv_heads")
    if kv_heads is None and config.get("multi_query_attention"):
        kv_heads = 1
    kv_heads = kv_heads or heads
    head_dim = _number(config, "head_dim") or (hidden_size // heads if hidden_size and heads else None)
    kinds = config_value(config, "layer_types")
    if isinstance(kinds, list) and layer_id < len(kinds) and kinds[layer_id] == "full_attention":
        head_dim = _number(config, "global_head_dim") or head_dim
        kv_heads = _number(config, "num_global_key_value_heads") or kv_heads
    return CacheLayer(kv_heads, head_dim) if kv_heads and head_dim else None


def _found_layer(shapes: Mapping[str, tuple[int, ...]], stated: CacheLayer | None) -> CacheLayer | None:
    """What the tensors of a layer say; the norm of a head tells its width where there is one."""
    norm = next((shapes[name] for name in _KEY_NORMS if name in shapes), None)
    head_dim = norm[0] if norm else stated.head_dim if stated else None
    keys = next((shapes[name] for name in _KEYS if name in shapes), None)
    if keys and head_dim:
        return CacheLayer(keys[0] // head_dim, head_dim)
    if _FUSED in shapes and head_dim and stated:
        return CacheLayer(stated.num_kv_heads, head_dim)
    return None


def _describe_head(has_head: bool, says_tied: bool, is_complete: bool) -> str:
    if has_head:
        return "its own, although config.json says tied" if says_tied else "its own"
    if is_complete:
        return "tied to the embedding"
    return f"{'tied to the embedding' if says_tied else 'its own'}, says config.json"


def _experts(config: Mapping[str, Any]) -> tuple[int, int] | None:
    total = _number(config, "num_experts")
    chosen = _number(config, "num_experts_per_tok", "top_k_experts")
    return (total, chosen) if total and chosen else None


def _number(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first key that holds a positive whole number, at the top or in `text_config`."""
    values = (as_token_id(config_value(config, key)) for key in keys)
    return next((value for value in values if value is not None and value > 0), None)


def _agreed(key: str, stated: int | None, found: int | None, problems: list[str]) -> int | None:
    """What the tensors say, or else config.json; a problem when they differ or neither speaks."""
    if stated is not None and found is not None and stated != found:
        problems.append(f"config.json says {key} {stated}, the tensors are those of {key} {found}")
    if stated is None and found is None:
        problems.append(f"neither config.json nor the tensors tell {key}")
    return stated if found is None else found
