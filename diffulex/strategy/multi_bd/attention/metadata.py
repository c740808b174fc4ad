"""The attention metadata object of `multi_bd`."""

from __future__ import annotations

from dataclasses import dataclass

from diffulex.attention.metadata import AttnMetaDataBase, MetadataSlot
from diffulex.mixin.multi_block.attention_metadata import MultiBlockAttnMetaDataMixin


@dataclass
class MultiBDAttnMetaData(MultiBlockAttnMetaDataMixin, AttnMetaDataBase):
    """Block-causal rows over paged prefixes."""

    def __post_init__(self) -> None:
        self.init_multi_block()


SLOT: MetadataSlot[MultiBDAttnMetaData] = MetadataSlot(MultiBDAttnMetaData)
