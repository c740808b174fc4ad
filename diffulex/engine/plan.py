"""What the scheduler hands to the runner (`StepPlan`) and what comes back (`StepResult`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from diffulex.engine.request import MultiBlockReqTemplate


class ForwardKind(Enum):
    """Why a request takes part in a forward; the names are the fields of `NfeCounts`."""

    PREFILL = "prefill"
    DENOISE = "denoise"
    STORE = "store"
    REBUILD = "rebuild"


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Positions ``[start, end)`` of one request in one forward; ``[start, store_end)`` are stored.

    `samples` is False for a piece of a split prefill or rebuild, which never looks at the window.
    """

    req: MultiBlockReqTemplate
    start: int
    end: int
    store_end: int
    samples: bool
    kind: ForwardKind

    @property
    def num_rows(self) -> int:
        """Rows the span adds to the forward."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests of one forward, in arrival order."""

    step_id: int
    spans: tuple[RequestSpan, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the whole forward."""
        return sum(span.num_rows for span in self.spans)

    def rows_by_kind(self) -> dict[str, int]:
        """Rows of the forward by purpose; purposes without rows are left out.

        Rows of the prompt's head are ``prefill`` also where they share a span with rows that are denoised,
        and ``rebuild`` once the request has lost its pages.
        """
        rows: dict[str, int] = {}
        for span in self.spans:
            num_head = min(max(span.req.head_end - span.start, 0), span.num_rows)
            again = span.kind is ForwardKind.REBUILD or span.req.num_preemptions > 0
            head = ForwardKind.REBUILD if again else ForwardKind.PREFILL
            for kind, num in ((head, num_head), (span.kind, span.num_rows - num_head)):
                if num:
                    rows[kind.value] = rows.get(kind.value, 0) + num
        return rows


@dataclass(frozen=True, slots=True)
class StepResult:
    """What sampling decided, on the host.

    Attributes:
        row_offsets: ``[len(spans) + 1]``; rows of span ``i`` are ``[row_offsets[i], row_offsets[i + 1])``.
        positions: ``[N] int64`` absolute positions that were sampled.
        tokens: ``[N] int64`` chosen tokens.
        confidences: ``[N] float32`` probabilities of the chosen tokens at temperature 1.
        accepted: ``[N] bool`` positions to fill.
        failed: span number -> message, for requests whose logits were not finite.
        times: seconds by part, ``prepare``, ``forward`` and ``sample``.
    """

    row_offsets: NDArray[np.int64]
    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    confidences: NDArray[np.float32]
    accepted: NDArray[np.bool_]
    failed: dict[int, str] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
