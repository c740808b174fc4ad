"""Collective operations of a tensor-parallel group; at size 1 each of them is the identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.distributed.state import ParallelState


def all_reduce(x: Tensor, parallel: ParallelState) -> Tensor:
    """The sum of `x` over the group, in place."""
    if parallel.size > 1:
        dist.all_reduce(x, group=parallel.group)
    return x


def all_minimum(value: int, parallel: ParallelState) -> int:
    """The smallest `value` of the group, the same on every rank."""
    if parallel.size == 1:
        return value
    device = "cuda" if dist.get_backend(parallel.group) == "nccl" else "cpu"
    smallest = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=parallel.group)
    return int(smallest.item())


def all_gather_last(x: Tensor, parallel: ParallelState) -> Tensor:
    """The pieces of all ranks joined along the last axis, in the order of the ranks."""
    if parallel.size == 1:
        return x
    pieces = [torch.empty_like(x) for _ in range(parallel.size)]
    dist.all_gather(pieces, x.contiguous(), group=parallel.group)
    return torch.cat(pieces, dim=-1)
