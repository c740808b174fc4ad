"""One whole sequence through a real model, no cache: what each row sees is given row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.attention.metadata import AttnMetaDataBase, MetadataSlot, set_fetch_fn_for_attn_metadata

if TYPE_CHECKING:
    from diffulex.model.decoder import DiffusionLM

_SLOT = MetadataSlot(AttnMetaDataBase)


def block_causal_ends(length: int, block_size: int) -> torch.Tensor:
    """``[length] int32``: every position sees to the end of its own block."""
    return ((torch.arange(length) // block_size + 1) * block_size).to(torch.int32)


@torch.inference_mode()
def full_logits(model: DiffusionLM, ids: list[int], ends: torch.Tensor) -> torch.Tensor:
    """``[length, vocabulary]`` logits of positions 0 and following."""
    set_fetch_fn_for_attn_metadata(_SLOT.fetch)
    length = len(ids)
    _SLOT.set(
        cu_q_lens=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.zeros(1, dtype=torch.int32),
        page_tables=torch.empty(1, 0, dtype=torch.int32),
        slot_mapping=torch.full((length,), -1),
        visible_ends=ends,
        page_size=4,
    )
    logits = model.compute_logits(model(torch.tensor(ids), torch.arange(length))).float()
    _SLOT.reset()
    return logits
