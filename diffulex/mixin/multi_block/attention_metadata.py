"""Attention metadata of block strategies: what a forward stores and what each row sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MultiBlockAttnMetaDataMixin:
    """Adds the block geometry to `AttnMetaDataBase`; which rows see what stands in ``visible_ends``.

    Attributes:
        block_size: positions in a block.
        buffer_size: blocks that may be open at one time.
    """

    block_size: int = 1
    buffer_size: int = 1

    def init_multi_block(self) -> None:
        """Checks the geometry.

        Raises:
            ValueError: a size is not positive.
        """
        if self.block_size < 1 or self.buffer_size < 1:
            raise ValueError(
                f"block_size ({self.block_size}) and buffer_size ({self.buffer_size}) must be at least 1"
            )
