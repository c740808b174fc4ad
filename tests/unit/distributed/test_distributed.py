from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from diffulex.distributed.collectives import all_gather_last, all_reduce
from diffulex.distributed.state import SINGLE, ParallelState

if TYPE_CHECKING:
    from pathlib import Path


def test_one_process_keeps_its_tensor() -> None:
    x = torch.randn(2, 3)
    assert all_reduce(x, SINGLE) is x
    assert all_gather_last(x, SINGLE) is x


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (1, -1)])
def test_a_rank_outside_its_group_is_refused(size: int, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank must be in \[0, {size}\), it is {rank}"):
        ParallelState(size, rank)


def test_shares_are_even_or_refused() -> None:
    assert ParallelState(4, 1).share(12, "heads") == 3
    with pytest.raises(ValueError, match=r"heads \(10\) must be divisible"):
        ParallelState(4, 1).share(10, "heads")


def _run_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    parallel = ParallelState(2, rank)
    x = torch.full((2, 1), float(rank + 1))
    gathered = all_gather_last(x, parallel)
    torch.save((all_reduce(x.clone(), parallel), gathered), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_add_up_and_gather_in_the_order_of_ranks(tmp_path: Path) -> None:
    mp.spawn(_run_rank, args=(str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        total, gathered = torch.load(tmp_path / f"rank{rank}.pt")
        assert total.tolist() == [[3.0], [3.0]]
        assert gathered.tolist() == [[1.0, 2.0], [1.0, 2.0]]
