"""Dream and DiffuCoder: a Qwen2 decoder whose attention sees both ways. Logits are shifted by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diffulex.model.decoder import DecoderConfig, DiffusionLM
from diffulex.model.dream_reasoner import DreamReasonerLM

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class DreamLM(DiffusionLM):
    """Dream-v0-{Base,Instruct}-7B, Dream-Coder, DiffuCoder-7B-{Base,Instruct,cpGRPO}.

    Queries, keys and values have a bias, whatever config.json says. The published configuration class assumes
    another rotary base than the checkpoints have, so every number must stand in the file.
    """

    model_types = frozenset({"Dream"})
    architectures = frozenset({"DreamModel"})

    @classmethod
    def recognises(cls, facts: CheckpointFacts) -> bool:
        """Dream's own name, on anything but a DreamReasoner, which calls itself Dream as well."""
        return super().recognises(facts) and not DreamReasonerLM.recognises(facts)

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DecoderConfig:
        """The shape that config.json states."""
        return replace(super().read_config(facts, tensor_names), qkv_bias=True)
