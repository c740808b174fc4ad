"""Where log lines of a run go: short ones to the terminal, all of them, lm-eval's included, into ``run.log``.

Lines written before the run folder exists are kept and stand at the top of its log.
"""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_OWN = ("diffulex", "diffulex_bench")
_FOREIGN = ("lm_eval", "datasets", "py.warnings")
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red"}
_KEPT_LINES = 10_000


class RunLogs:
    """Log handlers of one command; a context manager that leaves logging as it found it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._terminal = _TerminalHandler(self.console)
        self._kept = MemoryHandler(_KEPT_LINES, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._file: logging.FileHandler | None = None
        self._before: list[tuple[logging.Logger, int, bool, list[logging.Handler]]] = []

    def __enter__(self) -> Self:
        for name in (*_OWN, *_FOREIGN):
            logger = logging.getLogger(name)
            self._before.append((logger, logger.level, logger.propagate, list(logger.handlers)))
            # Debug lines of the engine come with every forward pass; those of the bench hold tracebacks.
            logger.setLevel(logging.DEBUG if name == "diffulex_bench" else logging.INFO)
            logger.propagate = False
            logger.handlers = [self._kept, self._terminal] if name in _OWN else [self._kept]
        logging.captureWarnings(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.captureWarnings(False)
        for logger, level, propagate, handlers in self._before:
            logger.setLevel(level)
            logger.propagate = propagate
            logger.handlers = handlers
        self._before.clear()
        self._kept.close()
        if self._file is not None:
            self._file.close()

    def move_to(self, path: Path) -> None:
        """From now on lines go to ``path``, those of before first."""
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._kept.setTarget(file)
        self._kept.flush()
        for logger, *_ in self._before:
            logger.handlers = [file if handler is self._kept else handler for handler in logger.handlers]
        self._file = file

    @property
    def path(self) -> Path | None:
        """The log file once there is one."""
        from pathlib import Path

        return None if self._file is None else Path(self._file.baseFilename)


class _TerminalHandler(logging.Handler):
    """Prints above a progress bar instead of through it."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One line: the message, with the level in front of warnings and errors."""
        label = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        style = _STYLES.get(record.levelno, "")
        self._console.print(Text(label + record.getMessage(), style=style), soft_wrap=True)
