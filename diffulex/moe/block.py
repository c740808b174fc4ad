"""The expert layer that stands in a decoder layer where a dense one has its MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from diffulex.distributed.state import SINGLE, ParallelState
from diffulex.layer.weights import WeightSlot, prefixed
from diffulex.moe.experts import Experts
from diffulex.moe.router import Router, RouterSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Shape of the expert layers of a family.

    Attributes:
        router: how experts are chosen.
        expert_size: width of one expert.
        shared_size: width of the experts that every token goes to, all together; 0 is none.
        sparse_layers: numbers of the decoder layers that have experts; the others are dense.
        is_stacked: the checkpoint holds the experts of a layer stacked.
    """

    router: RouterSpec
    expert_size: int
    sparse_layers: frozenset[int]
    shared_size: int = 0
    is_stacked: bool = False


class MoeBlock(nn.Module):
    """Routed experts plus, with `shared`, an MLP of the same input that every row goes through."""

    def __init__(
        self,
        shape: MoeShape,
        hidden_size: int,
        *,
        shared: nn.Module | None = None,
        dtype: torch.dtype,
        parallel: ParallelState = SINGLE,
    ) -> None:
        super().__init__()
        self.router = Router(shape.router, hidden_size, dtype=dtype)
        self.experts = Experts(
            shape.router.num_experts,
            hidden_size,
            shape.expert_size,
            is_stacked=shape.is_stacked,
            dtype=dtype,
            parallel=parallel,
        )
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden] -> [T, hidden]``; everything is added up in float32 and rounded once."""
        out: Tensor = self.experts(x, self.router(x))
        if self.shared is not None:
            out = out + self.shared(x)
        return out.to(x.dtype)

    def routed_slots(self) -> dict[str, WeightSlot]:
        """Slots of router (``gate``) and routed experts (``experts``); those of `shared` are its maker's."""
        return {
            **prefixed("gate", self.router.weight_slots()),
            **prefixed("experts", self.experts.weight_slots()),
        }


def use_forms(model: nn.Module, gemm_impl: str, dispatcher: str) -> None:
    """All experts of `model` compute with these forms from here on; a model without experts is left alone."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.gemm_impl, module.dispatcher = gemm_impl, dispatcher
