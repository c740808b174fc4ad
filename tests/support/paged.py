"""Runs a model over packed rows and pages without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from diffulex.attention.cache_layout import UnifiedLayout
from diffulex.attention.metadata import AttnMetaDataBase, set_fetch_fn_for_attn_metadata
from diffulex.model.loader import load_model
from diffulex.utils.adapter_files import read_adapter
from diffulex.utils.checkpoint import read_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from diffulex.attention.cache_layout import CacheLayout
    from diffulex.model.decoder import DiffusionLM


def load(
    folder: Path,
    model_name: str = "sdar",
    dtype: torch.dtype = torch.float32,
    adapter: Path | None = None,
    merge: bool = False,
) -> DiffusionLM:
    """The model in `folder`, on the CPU, with the adapter in `adapter` beside its weights or merged."""
    facts = read_checkpoint(folder)
    settings: Any = SimpleNamespace(
        model_name=model_name, checkpoint=facts, mask_token_id=facts.mask_token_id or 0
    )
    found = None if adapter is None else read_adapter(adapter)
    return load_model(settings, torch.device("cpu"), dtype, adapter=found, merge_adapter=merge)


@dataclass
class Part:
    """Rows of one request in a forward: ids at positions ``[start, start + len)`` and what each row sees."""

    request: int
    ids: Tensor
    ends: Tensor
    start: int = 0
    is_stored: bool = False
    positions: Tensor | None = None


class PagedRun:
    """A page pool for one model: pages are given to requests in a shuffled order, unwritten slots are NaN."""

    def __init__(
        self,
        model: DiffusionLM,
        page_size: int = 4,
        num_pages: int = 0,
        seed: int = 0,
        layout: CacheLayout | None = None,
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables: dict[int, list[int]] = {}
        layout = layout or UnifiedLayout()
        for layer in model.attention_layers():
            layer.k_cache = layer.v_cache = None
            if num_pages:
                caches = layout.allocate(
                    num_pages, page_size, layer.kv_shape, model.dtype, torch.device("cpu")
                )
                layer.k_cache, layer.v_cache = (cache.fill_(torch.nan) for cache in caches)

    @torch.inference_mode()
    def logits(self, parts: Sequence[Part], attn_impl: str = "naive") -> list[Tensor]:
        """Logits ``[rows, V]`` of each part, all parts in one forward."""
        metadata = self._metadata(parts, attn_impl)
        set_fetch_fn_for_attn_metadata(lambda: metadata)
        ids = torch.cat([part.ids for part in parts])
        positions = torch.cat([_positions(part) for part in parts])
        hidden = self.model(ids, positions)
        return list(self.model.compute_logits(hidden).split([len(part.ids) for part in parts]))

    def _metadata(self, parts: Sequence[Part], attn_impl: str) -> AttnMetaDataBase:
        slots: list[int] = []
        for part in parts:
            table = self.tables.setdefault(part.request, [])
            stop = part.start + len(part.ids)
            while part.is_stored and len(table) * self.page_size < stop:
                table.append(self.free.pop())
            slots += [
                table[i // self.page_size] * self.page_size + i % self.page_size if part.is_stored else -1
                for i in range(part.start, stop)
            ]
        tables = [self.tables[part.request] for part in parts]
        widest = max(len(table) for table in tables)
        lengths = torch.tensor([0] + [len(part.ids) for part in parts])
        return AttnMetaDataBase(
            cu_q_lens=lengths.cumsum(0).int(),
            context_lens=torch.tensor([part.start for part in parts], dtype=torch.int32),
            page_tables=torch.tensor([t + [-1] * (widest - len(t)) for t in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            visible_ends=torch.cat([part.ends for part in parts]).int(),
            page_size=self.page_size,
            attn_impl=attn_impl,
        )


def _positions(part: Part) -> Tensor:
    if part.positions is not None:
        return part.positions
    return torch.arange(part.start, part.start + len(part.ids))
