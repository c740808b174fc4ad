"""SDAR, dense: a Qwen3 decoder whose attention sees whole blocks. Logits are not shifted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diffulex.model.config_reader import ConfigReader
from diffulex.model.decoder import DecoderConfig, DiffusionLM

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class SdarLM(DiffusionLM):
    """JetLM/SDAR-{1.7B,4B,8B}-Chat and relatives.

    Queries and keys are normalised per head before the rotation. `attention_bias` gives all four attention
    projections a bias.
    """

    model_types = frozenset({"sdar"})
    architectures = frozenset({"SDARForCausalLM"})
    # What the published configuration class assumes where the file says nothing.
    default_head_dim = 128
    default_rope_theta = 10000.0
    default_rms_norm_eps = 1e-6

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DecoderConfig:
        """The shape that config.json states."""
        reader = ConfigReader(facts)
        has_bias = reader.flag("attention_bias", False)
        reader.finish()
        shared = super().read_config(facts, tensor_names)
        return replace(shared, qk_norm=True, qkv_bias=has_bias, output_bias=has_bias)
