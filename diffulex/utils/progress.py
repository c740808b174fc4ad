"""A progress bar over requests: how many ended, tokens, tokens per forward, tokens per second, time left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from diffulex.utils.output import RequestOutput, StepReport


class GenerationProgress:
    """Shows a bar on stderr while it is open; does nothing when not enabled.

    Tokens are counted as answers end; rich is imported only when the bar is shown.
    """

    def __init__(self, total: int, *, enabled: bool, label: str = "requests") -> None:
        self._total, self._enabled, self._label = total, enabled, label
        self._bar: Any = None
        self._task: Any = None
        self._start = time.perf_counter()
        self._num_finished = 0
        self._num_tokens = 0
        self._num_passes = 0

    def __enter__(self) -> Self:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def finished(self, output: RequestOutput) -> None:
        """Counts a request that ended."""
        self._num_finished += 1
        self._num_tokens += output.num_output_tokens
        self._num_passes += output.nfe.total

    def stepped(self, report: StepReport) -> None:
        """Redraws after an engine step."""
        if self._bar is None:
            return
        seconds = max(time.perf_counter() - self._start, 1e-9)
        tpf = self._num_tokens / self._num_passes if self._num_passes else 0.0
        figures = (
            f"{self._num_tokens} tokens  {tpf:.2f} TPF  {self._num_tokens / seconds:.0f} tok/s  "
            f"{report.num_running} running  {report.num_waiting} waiting"
        )
        self._bar.update(self._task, completed=self._num_finished, figures=figures)
