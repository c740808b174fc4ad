"""Fast-dLLM v2: a Qwen2 decoder whose attention sees whole blocks. Logits are shifted by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diffulex.model.decoder import DecoderConfig, DiffusionLM

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class FastDllmV2LM(DiffusionLM):
    """Fast_dLLM_v2_{1.5B,7B}.

    Queries, keys and values have a bias, whatever config.json says. The published configuration class assumes
    another rotary base than the checkpoints have, so every number must stand in the file.
    """

    model_types = frozenset({"Fast_dLLM_Qwen"})
    architectures = frozenset({"Fast_dLLM_QwenForCausalLM"})

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DecoderConfig:
        """The shape that config.json states."""
        return replace(super().read_config(facts, tensor_names), qkv_bias=True)
