"""The shape of a DiffusionGemma network, read from the `text_config` of its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diffulex.model.config_reader import ConfigReader
from diffulex.model.decoder import DecoderConfig

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"


@dataclass(frozen=True, slots=True)
class GemmaLayerShape:
    """What may differ from layer to layer.

    `window` is None in a layer that sees everything; such a layer has no value projection. Of the
    ``head_dim / 2`` rotary frequencies, counted with base `rope_theta`, the first `num_frequencies` turn.
    """

    window: int | None
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    num_frequencies: int

    @property
    def rope(self) -> tuple[int, float, int]:
        """Layers in which this is equal rotate alike."""
        return self.head_dim, self.rope_theta, self.num_frequencies


@dataclass(frozen=True, kw_only=True)
class DiffusionGemmaConfig(DecoderConfig):
    """Shape of the network; heads, head width and rotary base of the shared part are the sliding layers'.

    `intermediate_size` is the width of the dense MLP and of the self-conditioning MLP, `expert_size` that of
    an expert.
    """

    layers: tuple[GemmaLayerShape, ...]
    num_experts: int
    num_chosen_experts: int
    expert_size: int
    logit_cap: float
    canvas_length: int


def read_gemma_config(facts: CheckpointFacts, tensor_names: Collection[str]) -> DiffusionGemmaConfig:
    """The shape that config.json states.

    Sizes must be stated: the defaults of the published configuration class are those of another model.

    Raises:
        CheckpointError: lists everything in the file that is missing or cannot be run.
    """
    reader = ConfigReader(facts)
    text = reader.section("text_config")
    reader.expect("tie_word_embeddings", True)
    text.expect("hidden_activation", "gelu_pytorch_tanh")
    text.expect("attention_bias", False)
    text.expect("use_bidirectional_attention", "vision")
    num_heads, layers = text.count("num_attention_heads"), _read_layers(text)
    config = DiffusionGemmaConfig(
        vocab_size=text.count("vocab_size"),
        hidden_size=text.count("hidden_size"),
        intermediate_size=text.count("intermediate_size"),
        num_layers=len(layers),
        num_heads=num_heads,
        num_kv_heads=text.count("num_key_value_heads"),
        head_dim=text.count("head_dim", 256),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope_theta=layers[0].rope_theta,
        qk_norm=True,
        tie_word_embeddings="lm_head.weight" not in tensor_names,
        layers=layers,
        num_experts=text.count("num_experts"),
        num_chosen_experts=text.count("top_k_experts"),
        expert_size=text.count("moe_intermediate_size"),
        logit_cap=text.number("final_logit_softcapping", 30.0),
        canvas_length=reader.count("canvas_length", 256),
    )
    text.check(
        config.num_chosen_experts <= config.num_experts,
        f"top_k_experts ({config.num_chosen_experts}) must not exceed num_experts ({config.num_experts})",
    )
    for layer_id, layer in enumerate(layers):
        text.check(
            num_heads % layer.num_kv_heads == 0,
            f"num_attention_heads ({num_heads}) must be a multiple of the {layer.num_kv_heads} key/value "
            f"heads of layer {layer_id}",
        )
        text.check(
            layer.head_dim % 2 == 0, f"head_dim of layer {layer_id} must be even, it is {layer.head_dim}"
        )
    reader.finish()
    return config


def _read_layers(text: ConfigReader) -> tuple[GemmaLayerShape, ...]:
    kinds = _read_kinds(text)
    window = text.count("sliding_window") if SLIDING in kinds else 0
    rope_table = text.section("rope_parameters")
    ropes = {kind: _read_rope(rope_table, kind) for kind in dict.fromkeys(kinds)}
    layers = []
    for kind, (num_kv_heads, head_dim) in zip(kinds, _read_heads(text, kinds), strict=True):
        theta, turning_part = ropes[kind]
        layers.append(
            GemmaLayerShape(
                window=window if kind == SLIDING else None,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope_theta=theta,
                num_frequencies=int(turning_part * head_dim // 2),
            )
        )
    return tuple(layers)


def _read_kinds(text: ConfigReader) -> list[str]:
    """Sliding or full for each layer; the last layer is full whatever the file says."""
    num_layers = text.count("num_hidden_layers")
    five_to_one = [FULL if layer_id % 6 == 5 else SLIDING for layer_id in range(num_layers)]
    kinds = list(text.words("layer_types", (SLIDING, FULL), five_to_one))
    if len(kinds) != num_layers:
        text.check(False, f"layer_types has {len(kinds)} entries for {num_layers} layers")
        kinds = five_to_one
    return [*kinds[:-1], FULL]


def _read_heads(text: ConfigReader, kinds: list[str]) -> list[tuple[int, int]]:
    """Key/value heads and head width of each layer, in either spelling of what differs.

    Published files state `global_head_dim` and `num_global_key_value_heads` for all full layers, files that
    newer tools wrote have a table `per_layer_config` by layer number.
    """
    shared = text.count("num_key_value_heads"), text.count("head_dim", 256)
    if "per_layer_config" not in text.stated_keys():
        full = text.count("num_global_key_value_heads", shared[0]), text.count("global_head_dim", 512)
        return [full if kind == FULL else shared for kind in kinds]
    table = text.section("per_layer_config")
    heads = [shared] * len(kinds)
    for key in table.stated_keys():
        known = key.isdigit() and int(key) < len(kinds)
        table.check(known, f"per_layer_config has an entry {key!r}, which is no layer of {len(kinds)}")
        entry = table.section(key)
        strange = sorted(set(entry.stated_keys()) - {"head_dim", "num_key_value_heads"})
        table.check(
            not strange, f"per_layer_config of layer {key} sets {', '.join(strange)}, which is not read"
        )
        if known:
            heads[int(key)] = (
                entry.count("num_key_value_heads", shared[0]),
                entry.count("head_dim", shared[1]),
            )
    return heads


def _read_rope(ropes: ConfigReader, kind: str) -> tuple[float, float]:
    """Base of the rotary frequencies, and the part of them that turns anything."""
    rope = ropes.section(kind)
    is_proportional = rope.word("rope_type", ("default", "proportional"), "default") == "proportional"
    rope.expect("factor", 1.0)
    theta = rope.number("rope_theta")
    part = rope.number("partial_rotary_factor", 1.0)
    rope.check(part <= 1.0, f"partial_rotary_factor of {kind} must not exceed 1, it is {part}")
    if not is_proportional:
        # Without "proportional" the factor would narrow the rotated width, which no published file does.
        rope.expect("partial_rotary_factor", 1.0)
    return theta, part
