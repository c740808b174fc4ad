"""The decoder of families with experts: some of its layers, or all, have an expert layer for an MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from diffulex.layer.weights import WeightSlot, prefixed
from diffulex.model.decoder import DecoderConfig, DecoderLayer, DecoderNames, DiffusionLM, GatedMLP
from diffulex.moe.block import MoeBlock, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from diffulex.distributed.state import ParallelState

#: What both families with experts call the parts of an expert layer.
_LAYER: Final = "mlp"
_SHARED: Final = "mlp.shared_experts"


@dataclass(frozen=True, kw_only=True)
class MoeDecoderConfig(DecoderConfig):
    """Shape of a decoder with experts; `intermediate_size` is the width of its dense layers."""

    moe: MoeShape


class MoeMLP(MoeBlock):
    """The expert layer of a decoder layer, with the checkpoint's names of its parts."""

    def __init__(self, config: MoeDecoderConfig, dtype: torch.dtype, parallel: ParallelState) -> None:
        width = config.moe.shared_size
        shared = GatedMLP(replace(config, intermediate_size=width), dtype, parallel) if width else None
        super().__init__(config.moe, config.hidden_size, shared=shared, dtype=dtype, parallel=parallel)

    def weight_slots(self, names: DecoderNames) -> dict[str, WeightSlot]:
        """Slots by the family's names."""
        slots = prefixed(_LAYER, self.routed_slots())
        if isinstance(self.shared, GatedMLP):
            parts = {part: f"{_SHARED}.{part}_proj" for part in ("gate", "up", "down")}
            slots |= self.shared.weight_slots(replace(names, **parts))
        return slots


class MoeDiffusionLM(DiffusionLM):
    """A diffusion language model with experts; the base of every such family."""

    config: MoeDecoderConfig

    def make_layer(
        self, config: DecoderConfig, layer_id: int, dtype: torch.dtype, parallel: ParallelState
    ) -> nn.Module:
        """The layer of that number, its weights not yet filled."""
        assert isinstance(config, MoeDecoderConfig)
        is_sparse = layer_id in config.moe.sparse_layers
        return DecoderLayer(config, dtype, parallel, MoeMLP(config, dtype, parallel) if is_sparse else None)


def holds_stacked_experts(tensor_names: Iterable[str]) -> bool:
    """Whether a checkpoint keeps the experts of a layer in one tensor, as training code does."""
    return any(name.endswith(f".{_LAYER}.experts.gate_proj") for name in tensor_names)
