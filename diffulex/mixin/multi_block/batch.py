"""Request spans -> the packed arrays of one ragged forward.

Axes: R requests, T forwarded rows, N sampled rows, G sampled blocks, S saved boundary rows.
Everything is built in numpy and moved to the device at once; per request the work is a few array operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from diffulex.sampling_params import FORCE_SCORES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from diffulex.sampling_params import SamplingParams


class BlockRequest(Protocol):
    """What a batch reads of a request."""

    tokens: NDArray[np.int64]
    pages: list[int]
    slot: int
    sampling_params: SamplingParams

    def visible_ends(self, start: int, end: int) -> NDArray[np.int32]:
        """End of what each position sees."""
        ...

    def sample_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Open positions, their block in the window, and which blocks may be forced."""
        ...

    def uniforms(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The draws of `positions`."""
        ...


class BlockSpan(Protocol):
    """What a batch reads of a span."""

    @property
    def req(self) -> BlockRequest:
        """The request."""
        ...

    @property
    def start(self) -> int:
        """First position."""
        ...

    @property
    def end(self) -> int:
        """One past the last position."""
        ...

    @property
    def store_end(self) -> int:
        """Positions before it are stored."""
        ...

    @property
    def samples(self) -> bool:
        """Whether open positions are sampled."""
        ...


@dataclass(frozen=True, slots=True)
class DrawArrays:
    """Sampling parameters by row, present when a request of the batch draws or forces unusually."""

    temperature_N: NDArray[np.float32]
    top_p_N: NDArray[np.float32]
    top_k_N: NDArray[np.int64]
    uniform_N: NDArray[np.float64]
    force_score_N: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """One ragged forward in numpy.

    Attributes:
        input_ids: ``[T] int64``; the mask id stands at open positions.
        positions: ``[T] int64`` absolute positions.
        visible_ends: ``[T] int32`` row sees positions before it.
        slot_mapping: ``[T] int64`` cache slot of the row's KV, -1 when it is not stored.
        cu_q_lens: ``[R + 1] int32`` row offsets of the requests.
        context_lens: ``[R] int32`` positions read from pages.
        page_tables: ``[R, max_pages] int32``, padded with -1.
        row_offsets: ``[R + 1] int64`` sampled-row offsets of the requests.
        sample_positions: ``[N] int64`` absolute positions that are sampled.
        logits_rows: ``[N] int64`` forward row that predicts each; below 0: boundary row of slot ``-1 - row``.
        groups: ``[N] int64`` sampled block of each row, ``can_force`` ``[G] bool``.
        save_rows: ``[S] int64`` forward rows to keep as boundary rows, ``save_slots`` ``[S] int64`` where.
        draws: per-row sampling parameters, None when every row is greedy and forced by probability.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    visible_ends: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    cu_q_lens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    page_tables: NDArray[np.int32]
    row_offsets: NDArray[np.int64]
    sample_positions: NDArray[np.int64]
    logits_rows: NDArray[np.int64]
    groups: NDArray[np.int64]
    can_force: NDArray[np.bool_]
    save_rows: NDArray[np.int64]
    save_slots: NDArray[np.int64]
    draws: DrawArrays | None


def build_batch(spans: Sequence[BlockSpan], page_size: int, *, shift_logits: bool) -> BlockBatch:
    """Packs `spans`; with `shift_logits` the row of position i - 1 predicts position i."""
    lengths = np.array([span.end - span.start for span in spans], np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    picks = [_pick_rows(span, int(offsets[i]), shift_logits=shift_logits) for i, span in enumerate(spans)]
    group_offsets = np.cumsum([0] + [len(pick[3]) for pick in picks])
    counts = [len(pick[0]) for pick in picks]
    saves = [
        (offsets[i] + span.store_end - 1 - span.start, span.req.slot)
        for i, span in enumerate(spans)
        if shift_logits and span.store_end > span.start
    ]
    tables = np.full((len(spans), max(len(span.req.pages) for span in spans)), -1, np.int32)
    for table, span in zip(tables, spans, strict=True):
        table[: len(span.req.pages)] = span.req.pages
    return BlockBatch(
        input_ids=np.concatenate([span.req.tokens[span.start : span.end] for span in spans]),
        positions=positions,
        visible_ends=np.concatenate([span.req.visible_ends(span.start, span.end) for span in spans]),
        slot_mapping=np.concatenate([_slots(span, page_size) for span in spans]),
        cu_q_lens=offsets.astype(np.int32),
        context_lens=np.array([span.start for span in spans], np.int32),
        page_tables=tables,
        row_offsets=np.cumsum([0, *counts]),
        sample_positions=np.concatenate([pick[0] for pick in picks]),
        logits_rows=np.concatenate([pick[1] for pick in picks]),
        groups=np.concatenate([pick[2] + group_offsets[i] for i, pick in enumerate(picks)]),
        can_force=np.concatenate([pick[3] for pick in picks]),
        save_rows=np.array([row for row, _ in saves], np.int64),
        save_slots=np.array([slot for _, slot in saves], np.int64),
        draws=_draw_arrays(spans, [pick[0] for pick in picks]),
    )


_NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))


def _pick_rows(
    span: BlockSpan, offset: int, *, shift_logits: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Sampled positions of a span, the rows that predict them, their blocks, which blocks may be forced."""
    if not span.samples:
        return _NOTHING
    positions, blocks, force = span.req.sample_positions()
    rows = positions - span.start + offset
    if shift_logits:
        # The first row of the forward has no predecessor in it: the saved boundary row serves.
        rows = np.where(positions > span.start, rows - 1, -1 - span.req.slot)
    return positions, rows, blocks, force


def _slots(span: BlockSpan, page_size: int) -> NDArray[np.int64]:
    slots = np.full(span.end - span.start, -1, np.int64)
    stored = np.arange(span.start, span.store_end)
    if len(stored):
        pages = np.asarray(span.req.pages, np.int64)
        slots[: len(stored)] = pages[stored // page_size] * page_size + stored % page_size
    return slots


def _draw_arrays(spans: Sequence[BlockSpan], picked: list[NDArray[np.int64]]) -> DrawArrays | None:
    params = [span.req.sampling_params for span in spans]
    if all(one.temperature == 0 and one.confidence == FORCE_SCORES[0] for one in params):
        return None
    counts = [len(positions) for positions in picked]
    uniforms = [
        span.req.uniforms(positions) if one.temperature > 0 and len(positions) else np.zeros(len(positions))
        for span, one, positions in zip(spans, params, picked, strict=True)
    ]
    return DrawArrays(
        temperature_N=np.repeat(np.array([one.temperature for one in params], np.float32), counts),
        top_p_N=np.repeat(np.array([one.top_p for one in params], np.float32), counts),
        top_k_N=np.repeat(np.array([one.top_k for one in params], np.int64), counts),
        uniform_N=np.concatenate(uniforms),
        force_score_N=np.repeat(np.array([FORCE_SCORES.index(one.confidence) for one in params]), counts),
    )
