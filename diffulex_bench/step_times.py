"""Where the time of a run went: a listener that adds up the engine's step reports.

Prompts and answers share forward passes, so the time of a pass is split by the rows each kind put into it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffulex.utils.output import StepReport
    from diffulex_bench.records import SampleRecord

#: Parts of a step that compute rows; the rest of a step is bookkeeping.
MODEL_PARTS = ("prepare", "forward", "sample")

TIME_DEFINITIONS: dict[str, str] = {
    "time": "seconds inside engine steps; prefill + decode + rebuild + other is their total",
    "time.prefill": "prepare + forward + sample of every step, times the share of the rows of prompt heads "
    "(the prompt without the part that shares a block with the answer)",
    "time.decode": "the same for rows of denoise and store passes",
    "time.rebuild": "the same for rows that restore state after preemption",
    "time.other": "the rest of the steps: schedule, post and what no part names",
    "time.parts": "the same seconds by part: schedule (choose the requests of a step), prepare (build its "
    "tensors), forward (run the model), sample (choose tokens), post (write them back, end requests)",
    "time.rows": "rows computed by purpose: prefill, denoise, store, rebuild; their sum is tokens_forwarded",
}


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of all steps by purpose and by part; see `TIME_DEFINITIONS`."""

    prefill: float = 0.0
    decode: float = 0.0
    rebuild: float = 0.0
    other: float = 0.0
    total: float = 0.0
    num_steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


class StepTimes:
    """Adds up step reports; a listener of the lm-eval adapter."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._rows: Counter[str] = Counter()
        self._total = 0.0
        self._num_steps = 0

    def on_start(self, task: str, num_requests: int) -> None:
        """Nothing to do."""

    def on_sample(self, record: SampleRecord, trace: list[list[Any]]) -> None:
        """Nothing to do."""

    def on_step(self, report: StepReport) -> None:
        """The step's seconds are added."""
        self._num_steps += 1
        self._total += report.step_time
        for part, seconds in report.times.items():
            self._parts[part] += seconds
        self._rows.update(report.rows_by_kind)
        num_rows = sum(report.rows_by_kind.values())
        if num_rows:
            model = sum(report.times.get(part, 0.0) for part in MODEL_PARTS)
            for kind, rows in report.rows_by_kind.items():
                self._seconds[kind] += model * rows / num_rows

    def split(self) -> TimeSplit:
        """The sums so far."""
        seconds = self._seconds
        decode = seconds["denoise"] + seconds["store"]
        named = seconds["prefill"] + decode + seconds["rebuild"]
        return TimeSplit(
            prefill=seconds["prefill"],
            decode=decode,
            rebuild=seconds["rebuild"],
            other=max(self._total - named, 0.0),
            total=self._total,
            num_steps=self._num_steps,
            parts=dict(self._parts),
            rows=dict(self._rows),
        )
