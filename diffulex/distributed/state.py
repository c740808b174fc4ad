"""Which part of a model this process holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ParallelState:
    """One process's place in a tensor-parallel group: `rank` of `size`; `group` None is the default group."""

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), it is {self.rank}; correct the rank")

    def share(self, total: int, what: str) -> int:
        """`total` divided among the processes; a remainder is a `ValueError` that names `what`."""
        if total % self.size:
            raise ValueError(
                f"{what} ({total}) must be divisible by the tensor parallel size ({self.size}); "
                "use a smaller size"
            )
        return total // self.size


SINGLE = ParallelState()
