"""The progress bar of a run: samples, tokens, tokens per forward pass, speed and time left.

On a terminal one line is redrawn; otherwise a log line appears every ten seconds at most.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from diffulex.logger import get_logger

if TYPE_CHECKING:
    from types import TracebackType

    from diffulex.utils.output import StepReport
    from diffulex_bench.records import SampleRecord

logger = get_logger(__name__)

LOG_SECONDS = 10.0


class RunProgress:
    """Shows how far a run is; a listener of the lm-eval adapter, used as a context manager."""

    def __init__(self, num_samples: int, *, enabled: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.num_samples = num_samples
        self.num_done = 0
        self.num_tokens = 0
        self.num_passes = 0
        self._filled = 0
        self._started = time.perf_counter()
        self._logged = self._started
        self._enabled = enabled
        self._bar = Progress(
            TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True)),
            # The bar takes the room that the numbers leave.
            BarColumn(None, table_column=Column(ratio=1, min_width=4)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True)),
            console=self.console,
            expand=True,
            transient=True,
            disable=not (enabled and self.console.is_terminal),
        )
        self._row = self._bar.add_task("starting", total=num_samples, facts="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """The bar is gone from the terminal; may be called more than once."""
        self._bar.stop()

    def on_start(self, task: str, num_requests: int) -> None:
        """The bar carries the name of ``task``; the clock starts with the first one."""
        if self.num_done == 0:
            self._started = self._logged = time.perf_counter()
        self.num_samples = max(self.num_samples, self.num_done + num_requests)
        self._bar.update(self._row, description=task, total=self.num_samples)

    def on_sample(self, record: SampleRecord, trace: list[list[Any]]) -> None:  # noqa: ARG002
        """One more sample is finished."""
        self.num_done += 1
        self.num_tokens += record.tokens_output
        self.num_passes += record.nfe["total"]
        self._bar.update(self._row, completed=self.num_done, facts=self.facts())
        self._log_now_and_then()

    def on_step(self, report: StepReport) -> None:
        """Filled positions count at once, so that the speed moves before a sample is done."""
        self._filled += report.num_tokens_filled
        self._bar.update(self._row, facts=self.facts())

    def facts(self) -> str:
        """Tokens, TPF, tokens per second and time left as one short text."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        tokens = max(self.num_tokens, self._filled)
        tpf = f"{self.num_tokens / self.num_passes:.2f}" if self.num_passes else "-"
        return f"{tokens:,} tok  TPF {tpf}  {tokens / seconds:,.0f} tok/s  {self._time_left(seconds)} left"

    def _time_left(self, seconds: float) -> str:
        if not self.num_done:
            return "?"
        left = round(seconds / self.num_done * (self.num_samples - self.num_done))
        minutes, rest = divmod(left, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

    def _log_now_and_then(self) -> None:
        now = time.perf_counter()
        if self._enabled and not self.console.is_terminal and now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.info("%d/%d samples, %s", self.num_done, self.num_samples, self.facts())
