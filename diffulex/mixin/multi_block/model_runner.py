"""The three parts of a step on the device: prepare the batch, forward it, sample the rows that are read.

Axes: T forwarded rows, N sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from diffulex.attention.metadata import AttnMetaDataBase, set_fetch_fn_for_attn_metadata
from diffulex.mixin.multi_block.batch import BlockBatch, BlockSpan, build_batch
from diffulex.sampler.base import SamplerInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from diffulex.config import Config
    from diffulex.sampler.base import Sampler


class LanguageModel(Protocol):
    """What a runner calls of a model."""

    vocab_size: int

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states ``[T, hidden]``."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[N, V]`` of the given hidden states."""
        ...


@dataclass(frozen=True, slots=True)
class Decisions:
    """Sampled rows on the host: token ``[N] int64``, confidence ``[N] float32``, accepted ``[N] bool``."""

    tokens: NDArray[np.int64]
    confidences: NDArray[np.float32]
    accepted: NDArray[np.bool_]


class MultiBlockRunnerMixin:
    """Prepare, forward and sample for block strategies; mixed into a runner that owns model and cache."""

    config: Config
    device: torch.device
    model: LanguageModel
    sampler: Sampler
    shift_logits: bool
    max_logits_rows: int
    set_attn_metadata: Callable[..., None]
    reset_attn_metadata: Callable[[], None]
    fetch_attn_metadata: Callable[[], AttnMetaDataBase]
    #: ``[max_num_reqs, V]`` logits row of the last stored position of each request; made on first use.
    boundary_rows: Tensor | None = None

    def prepare(self, spans: Sequence[BlockSpan]) -> BlockBatch:
        """Packs the spans of one forward."""
        return build_batch(spans, self.config.page_size, shift_logits=self.shift_logits)

    def forward(self, batch: BlockBatch) -> Tensor:
        """Hidden states ``[T, hidden]``; stores KV of the rows that have a slot."""
        # Another engine of this process may have bound its own metadata since.
        set_fetch_fn_for_attn_metadata(self.fetch_attn_metadata)
        self.set_attn_metadata(
            cu_q_lens=self._to_device(batch.cu_q_lens),
            context_lens=self._to_device(batch.context_lens),
            page_tables=self._to_device(batch.page_tables),
            slot_mapping=self._to_device(batch.slot_mapping),
            visible_ends=self._to_device(batch.visible_ends),
            page_size=self.config.page_size,
            attn_impl=self.config.attn_impl,
            block_size=self.config.block_size,
            buffer_size=self.config.buffer_size,
        )
        try:
            return self.model(self._to_device(batch.input_ids), self._to_device(batch.positions))
        finally:
            self.reset_attn_metadata()

    def sample(self, hidden_T: Tensor, batch: BlockBatch) -> Decisions:
        """Decides the open rows; logits exist only for a bounded number of rows at a time."""
        parts = [self._sample_rows(hidden_T, batch, rows) for rows in self._row_slices(batch)]
        self._save_boundary_rows(hidden_T, batch)
        if not parts:
            empty = np.zeros(0)
            return Decisions(empty.astype(np.int64), empty.astype(np.float32), empty.astype(np.bool_))
        packed = torch.cat(parts, dim=1).cpu().numpy()
        return Decisions(packed[0], packed[1].astype(np.int32).view(np.float32), packed[2].astype(np.bool_))

    def _sample_rows(self, hidden_T: Tensor, batch: BlockBatch, rows: slice) -> Tensor:
        """Token, bits of the float32 confidence and accepted, ``[3, n] int64``, for one copy to the host."""
        logits = self._logits_of(hidden_T, batch.logits_rows[rows])
        output = self.sampler(logits, self._sampler_input(batch, rows))
        bits = output.confidence_N.float().contiguous().view(torch.int32)
        return torch.stack([output.token_N, bits.to(torch.int64), output.accepted_N.to(torch.int64)])

    def _logits_of(self, hidden_T: Tensor, rows: NDArray[np.int64]) -> Tensor:
        inside = rows >= 0
        wanted = self._to_device(rows[inside])
        if self.config.needed_logits_only:
            logits = self.model.compute_logits(hidden_T[wanted])
        else:
            logits = self.model.compute_logits(hidden_T)[wanted]
        if inside.all():
            return logits
        result = logits.new_empty((len(rows), logits.shape[1]))
        result[self._to_device(np.flatnonzero(inside))] = logits
        kept = self._boundary(logits)[self._to_device(-1 - rows[~inside])]
        result[self._to_device(np.flatnonzero(~inside))] = kept
        return result

    def _save_boundary_rows(self, hidden_T: Tensor, batch: BlockBatch) -> None:
        """Keeps the row behind each request's stored positions; it predicts the first open position."""
        if not len(batch.save_rows):
            return
        logits = self.model.compute_logits(hidden_T[self._to_device(batch.save_rows)])
        self._boundary(logits)[self._to_device(batch.save_slots)] = logits

    def _boundary(self, like: Tensor) -> Tensor:
        if self.boundary_rows is None:
            self.boundary_rows = like.new_zeros((self.config.max_num_reqs, like.shape[1]))
        return self.boundary_rows

    def _row_slices(self, batch: BlockBatch) -> Iterator[slice]:
        """Pieces of at most `max_logits_rows` sampled rows, cut at block borders; one block at least."""
        total = len(batch.groups)
        borders = np.append(np.flatnonzero(np.diff(batch.groups)) + 1, total)
        start = 0
        while start < total:
            reachable = borders[(borders > start) & (borders <= start + self.max_logits_rows)]
            end = int(reachable[-1]) if len(reachable) else int(borders[borders > start][0])
            yield slice(start, end)
            start = end

    def _sampler_input(self, batch: BlockBatch, rows: slice) -> SamplerInput:
        extra: dict[str, Any] = {}
        if batch.draws is not None:
            names = ("temperature_N", "top_p_N", "top_k_N", "uniform_N", "force_score_N")
            extra = {name: self._to_device(getattr(batch.draws, name)[rows]) for name in names}
        return SamplerInput(
            groups_N=self._to_device(batch.groups[rows]),
            can_force_G=self._to_device(batch.can_force),
            accept_threshold=self.config.decoding_thresholds.accept_threshold,
            banned_id=self.config.mask_token_id,
            vocab_limit=self.config.vocab_limit,
            **extra,
        )

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)
