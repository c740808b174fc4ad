"""LLaDA: a Llama decoder with OLMo's names whose attention sees both ways. Logits are not shifted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.model.config_reader import ConfigReader
from diffulex.model.decoder import DecoderConfig, DecoderNames, DiffusionLM

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class LladaLM(DiffusionLM):
    """LLaDA-8B-{Base,Instruct} and LLaDA-1.5.

    `ff_out` is the name of two things: of the head, and inside a layer of the down projection. `ff_proj` is
    the gate.
    """

    model_types = frozenset({"llada"})
    architectures = frozenset({"LLaDAModelLM"})
    names = DecoderNames(
        embedding="model.transformer.wte",
        final_norm="model.transformer.ln_f",
        head="model.transformer.ff_out",
        layer="model.transformer.blocks.{}",
        attention_norm="attn_norm",
        mlp_norm="ff_norm",
        q="q_proj",
        k="k_proj",
        v="v_proj",
        output="attn_out",
        gate="ff_proj",
        up="up_proj",
        down="ff_out",
    )

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DecoderConfig:
        """The shape that config.json states under OLMo's keys; none of the usual ones are in the file."""
        reader = ConfigReader(facts)
        hidden_size, num_heads = reader.count("d_model"), reader.count("n_heads")
        shares_keys = reader.flag("multi_query_attention", False)
        num_kv_heads = reader.count("n_kv_heads", 1 if shares_keys else num_heads)
        is_tied = reader.flag("weight_tying", False)
        config = DecoderConfig(
            vocab_size=reader.count("embedding_size", facts.vocab_size),
            hidden_size=hidden_size,
            intermediate_size=reader.count(
                "mlp_hidden_size", round(reader.number("mlp_ratio", 4.0) * hidden_size)
            ),
            num_layers=reader.count("n_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=hidden_size // num_heads,
            rms_norm_eps=reader.number("rms_norm_eps"),
            rope_theta=reader.rope_theta(),
            rope_in_float32=reader.flag("rope_full_precision", True),
            qkv_bias=reader.flag("include_qkv_bias", False),
            tie_word_embeddings=is_tied and f"{cls.names.head}.weight" not in tensor_names,
        )
        _expect_the_published_kind(reader)
        reader.check(
            hidden_size % num_heads == 0, f"n_heads ({num_heads}) must divide d_model ({hidden_size})"
        )
        reader.check(config.head_dim % 2 == 0, f"d_model / n_heads must be even, it is {config.head_dim}")
        reader.check(
            num_heads % num_kv_heads == 0,
            f"n_heads ({num_heads}) must be a multiple of n_kv_heads ({num_kv_heads})",
        )
        reader.finish()
        return config


def _expect_the_published_kind(reader: ConfigReader) -> None:
    """The other networks that this configuration could describe are refused by the key that asks for them."""
    reader.expect("activation_type", "silu")
    reader.expect("block_type", "llama")
    reader.expect("block_group_size", 1)
    reader.expect("layer_norm_type", "rms")
    reader.expect("layer_norm_with_affine", True)
    reader.expect("rope", True)
    for key in (
        "alibi",
        "attention_layer_norm",
        "bias_for_layer_norm",
        "include_bias",
        "input_emb_norm",
        "scale_logits",
    ):
        reader.expect(key, False)
    reader.expect("clip_qkv", None)
