"""Stable-DiffCoder: a Llama decoder whose attention sees whole blocks. Logits are not shifted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.model.config_reader import ConfigReader
from diffulex.model.decoder import DecoderConfig, DiffusionLM

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class StableDiffCoderLM(DiffusionLM):
    """Stable-DiffCoder-8B-{Base,Instruct}, the network of Seed-Coder without any bias."""

    # The checkpoints call themselves "llama", as many others do.
    architectures = frozenset({"StableDiffcoderForCausalLM"})

    @classmethod
    def recognises(cls, facts: CheckpointFacts) -> bool:
        """The class is named among the architectures, or as the code that comes with the checkpoint."""
        code = facts.config.get("auto_map")
        named = [str(target) for target in code.values()] if isinstance(code, dict) else []
        return super().recognises(facts) or any(
            target.endswith(f".{architecture}") for target in named for architecture in cls.architectures
        )

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DecoderConfig:
        """The shape that config.json states."""
        reader = ConfigReader(facts)
        reader.expect("attention_bias", False)
        reader.expect("mlp_bias", False)
        reader.finish()
        return super().read_config(facts, tensor_names)
