"""Which masked positions are filled: all confident ones, and the best one of a block that may be forced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def accept_confident(
    confidence_N: Tensor, score_N: Tensor, groups_N: Tensor, can_force_G: Tensor, threshold: float
) -> Tensor:
    """Rows to fill: all above the threshold, or the best of a block that has none and may be forced.

    Of equal scores the first row is the best.

    Args:
        confidence_N: ``[N] float32`` probability of the chosen token.
        score_N: ``[N] float32`` what ranks the rows of a block when one is forced.
        groups_N: ``[N] int64`` block of each row.
        can_force_G: ``[G] bool``.
        threshold: strict lower bound.

    Returns:
        ``[N] bool``.
    """
    accepted_N = confidence_N > threshold
    num_groups = can_force_G.shape[0]
    has_any_G = torch.zeros(num_groups, dtype=torch.bool, device=confidence_N.device)
    has_any_G[groups_N[accepted_N]] = True
    wants_N = (can_force_G & ~has_any_G)[groups_N]
    best_G = score_N.new_full((num_groups,), float("-inf"))
    best_G.scatter_reduce_(0, groups_N, score_N, "amax")
    is_best_N = wants_N & (score_N == best_G[groups_N])
    row_N = torch.arange(len(groups_N), device=groups_N.device)
    none = len(groups_N)
    first_G = torch.full((num_groups,), none, dtype=torch.int64, device=groups_N.device)
    first_G.scatter_reduce_(0, groups_N, torch.where(is_best_N, row_N, none), "amin")
    return accepted_N | (is_best_N & (row_N == first_G[groups_N]))
