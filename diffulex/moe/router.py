"""Scores of a token for all experts -> the experts it goes to and their weights.

Axes: T packed rows, E experts, G groups of experts, K chosen experts, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from diffulex.layer.weights import WeightSlot, matrix, vector, whole

if TYPE_CHECKING:
    from torch import Tensor

# Keeps a token whose scores have all vanished from dividing zero by zero.
_SUM_EPS: Final = 1e-20
# A group of experts is as good as its two best members together.
_NUM_GROUP_BEST: Final = 2


class Routing(NamedTuple):
    """Where each row goes: `expert_ids` ``[T, K] int64``, all different, and `weights` ``[T, K] float32``."""

    expert_ids: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How a family chooses experts.

    Attributes:
        num_experts, num_chosen: E and K.
        scoring: softmax over all experts, or a sigmoid for each on its own.
        normalise: divide the weights of the chosen by their sum. Without it softmax weights sum to less
            than 1.
        num_groups, num_kept_groups: only members of the best groups can be chosen; equal numbers keep all.
        scaling: factor on the weights, after everything else.
        has_bias: a bias for each expert is added to its score for the choice, never to its weight.
        in_float32: the product with the router's matrix runs in float32 whatever the model's dtype.
    """

    num_experts: int
    num_chosen: int
    scoring: Literal["softmax", "sigmoid"]
    normalise: bool
    num_groups: int = 1
    num_kept_groups: int = 1
    scaling: float = 1.0
    has_bias: bool = False
    in_float32: bool = False

    def problems(self) -> list[str]:
        """What keeps these numbers from working together, one sentence each."""
        size, kept = self.num_experts // self.num_groups, self.num_kept_groups
        checks = (
            (
                self.num_chosen > self.num_experts,
                f"a token cannot go to {self.num_chosen} of {self.num_experts} experts",
            ),
            (
                self.num_experts % self.num_groups > 0,
                f"{self.num_experts} experts do not divide into {self.num_groups} groups",
            ),
            (kept > self.num_groups, f"{kept} of {self.num_groups} groups of experts cannot be kept"),
            (
                kept < self.num_groups and size < _NUM_GROUP_BEST,
                f"groups are compared by their {_NUM_GROUP_BEST} best experts, a group has {size}",
            ),
            (
                kept * size < self.num_chosen <= self.num_experts,
                f"{kept} groups of {size} experts hold less than the {self.num_chosen} that a token goes to",
            ),
        )
        return [problem for is_broken, problem in checks if is_broken]


def choose_experts(logits: Tensor, spec: RouterSpec, bias: Tensor | None = None) -> Routing:
    """The K best experts of each row, best first, and the weights of their results.

    Args:
        logits: ``[T, E]``, computed with in float32.
        spec: how to choose.
        bias: ``[E] float32``, added to the scores for the choice alone.
    """
    logits = logits.float()
    scores = logits.softmax(dim=-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if spec.num_kept_groups < spec.num_groups:
        ranked = _within_best_groups(ranked, spec.num_groups, spec.num_kept_groups)
    expert_ids = ranked.topk(spec.num_chosen, dim=-1).indices
    weights = scores.gather(-1, expert_ids)
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _SUM_EPS)
    return Routing(expert_ids, weights * spec.scaling)


def _within_best_groups(ranked: Tensor, num_groups: int, num_kept: int) -> Tensor:
    """`ranked` ``[T, E]`` with minus infinity for the experts of all but the best groups."""
    by_group = ranked.view(ranked.shape[0], num_groups, ranked.shape[1] // num_groups)
    group_scores = by_group.topk(_NUM_GROUP_BEST, dim=-1).values.sum(dim=-1)
    kept = group_scores.topk(num_kept, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, kept, False)
    # Minus infinity, not zero: a biased score may be negative.
    return by_group.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(-2)


class Router(nn.Module):
    """The router of one layer; every process of a group holds it whole and comes to the same choice."""

    def __init__(self, spec: RouterSpec, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.weight = matrix(spec.num_experts, hidden_size, torch.float32 if spec.in_float32 else dtype)
        self.bias = vector(spec.num_experts, torch.float32) if spec.has_bias else None

    def forward(self, x: Tensor) -> Routing:
        """Choice for rows ``[T, H]``."""
        return choose_experts(linear(x.to(self.weight.dtype), self.weight), self.spec, self.bias)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``weight`` and, with a bias, ``expert_bias``."""
        slots = {"weight": whole(self.weight)}
        return slots if self.bias is None else {**slots, "expert_bias": whole(self.bias)}
