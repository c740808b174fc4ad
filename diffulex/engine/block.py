"""One diffusion block: where it lies, what state it is in, what the last sampler verdict said. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BlockStatus(Enum):
    """States of a block, in the only order in which they may follow each other."""

    DUMMY = 0  # allocated behind the front, neither read nor sampled
    ACTIVE = 1  # being denoised; its KV is thrown away
    TO_CACHE = 2  # tokens final; the next forward stores its KV
    IN_CACHE = 3  # KV stored


@dataclass(slots=True)
class DiffusionBlock:
    """`block_size` consecutive positions of one request; made and changed by the request that owns it.

    Attributes:
        index: number of the block, counted from the end of the request's head (see `MultiBlockReqTemplate`).
        start: first absolute position.
        size: positions in the block.
        num_masks: positions that hold no token yet.
        status: see `BlockStatus`.
        commit_ready: the sampler has no objection to the block leaving ACTIVE.
        same_token_ratio: share of filled positions that the last sampling confirmed; 0.0 in a fresh block.
        total_steps: denoising forwards the block took part in.
        post_edit_steps: those of them that started without a mask.
    """

    index: int
    start: int
    size: int
    num_masks: int
    status: BlockStatus = BlockStatus.ACTIVE
    commit_ready: bool = False
    same_token_ratio: float = 0.0
    total_steps: int = 0
    post_edit_steps: int = 0

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.size

    @property
    def progress(self) -> float:
        """Share of positions that hold a token, prompt tokens included."""
        return (self.size - self.num_masks) / self.size

    @property
    def is_complete(self) -> bool:
        """True when every position holds a token."""
        return self.num_masks == 0
