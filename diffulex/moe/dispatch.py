"""Brings packed rows to their experts and the results back, within one process.

Axes: T packed rows, K chosen experts a row, N = T * K pairs of a row and one of its experts, E experts.
Pair ``t * K + k`` is the k-th choice of row t.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diffulex.moe.router import Routing


@dataclass(frozen=True)
class Dispatch:
    """The N pairs ordered by expert, and by row within an expert.

    `pairs` ``[N] int64`` names the pair at each place, `group_sizes` ``[E] int64`` says how many places each
    expert has: none, all, or anything between.
    """

    pairs: Tensor
    group_sizes: Tensor
    num_chosen: int

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """Expert, first place and end of its places, for the experts that have any."""
        found: list[tuple[int, int, int]] = []
        start = 0
        for expert, size in enumerate(self.group_sizes.tolist()):
            if size:
                found.append((expert, start, start + size))
            start += size
        return found

    def gather(self, x: Tensor) -> Tensor:
        """The input of each place: ``[T, H] -> [N, H]``."""
        return x.index_select(0, self.pairs // self.num_chosen)

    def combine(self, results: Tensor, weights: Tensor) -> Tensor:
        """Each row's weighted sum in float32: ``[N, H], [T, K] -> [T, H]``.

        The results of a row are added in the order of its choices, whatever other rows there are.
        """
        by_pair = torch.empty_like(results)
        by_pair[self.pairs] = results
        by_choice = by_pair.view(*weights.shape, results.shape[1]).float()
        return torch.bmm(weights.unsqueeze(1), by_choice).squeeze(1)


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> Dispatch:
    """One stable sort of all pairs."""
    flat = expert_ids.flatten()
    sizes = flat.bincount(minlength=num_experts)
    return Dispatch(flat.argsort(stable=True), sizes, expert_ids.shape[1])


def look_up_every_expert(expert_ids: Tensor, num_experts: int) -> Dispatch:
    """Every pair is compared with every expert: E * N comparisons and no sort."""
    experts = torch.arange(num_experts, device=expert_ids.device)
    is_sent = expert_ids.flatten() == experts.unsqueeze(1)
    return Dispatch(is_sent.nonzero()[:, 1], is_sent.sum(dim=1), expert_ids.shape[1])


DISPATCHERS: Final[Mapping[str, Callable[[Tensor, int], Dispatch]]] = {
    "standard": sort_by_expert,
    "naive": look_up_every_expert,
}


def dispatch(routing: Routing, num_experts: int, backend: str = "standard") -> Dispatch:
    """Which place each pair of `routing` takes; all backends agree on it.

    Raises:
        ValueError: `backend` is not one of `DISPATCHERS`.
    """
    if backend not in DISPATCHERS:
        raise ValueError(
            f"moe_dispatcher_backend must be one of {', '.join(DISPATCHERS)} within one process, "
            f"it is {backend!r}; leave it unset"
        )
    return DISPATCHERS[backend](routing.expert_ids, num_experts)
