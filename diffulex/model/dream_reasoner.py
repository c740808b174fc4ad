"""DreamReasoner: a Qwen3 decoder whose attention sees whole blocks. Logits are not shifted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diffulex.model.config_reader import ConfigReader
from diffulex.model.decoder import DecoderConfig, DiffusionLM
from diffulex.utils.checkpoint import weight_headers

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class DreamReasonerLM(DiffusionLM):
    """DreamReasoner-8B.

    Queries and keys are normalised per head before the rotation. `attention_bias` gives all four attention
    projections a bias.
    """

    model_types = frozenset({"Dream"})
    architectures = frozenset({"DreamForCausalLM"})
    # As in Qwen3; a head of another width shows in the shape of its norm.
    default_head_dim = 128

    @classmethod
    def recognises(cls, facts: CheckpointFacts) -> bool:
        """Dream's name, and one of what Dream itself does not have: this class, a block, norms of heads."""
        if not cls.architectures.isdisjoint(facts.architectures):
            return True
        if facts.model_type not in cls.model_types:
            return False
        has_block = facts.config.get("block_size") is not None
        return has_block or any(name.endswith(".q_norm.weight") for name in weight_headers(facts))

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DecoderConfig:
        """The shape that config.json states."""
        reader = ConfigReader(facts)
        has_bias = reader.flag("attention_bias", False)
        reader.finish()
        shared = super().read_config(facts, tensor_names)
        return replace(shared, qk_norm=True, qkv_bias=has_bias, output_bias=has_bias)
