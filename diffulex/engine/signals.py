"""SIGTERM ends an engine in order: it is shut down, then the handler that was there before has its turn.

SIGINT needs no handler: Python raises KeyboardInterrupt, the caller keeps what has finished, and `atexit` or
the context manager shuts the engine down.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class TerminationHandler:
    """Calls `shut_down` on SIGTERM while installed; does nothing outside the main thread."""

    def __init__(self, shut_down: Callable[[], None]) -> None:
        self._shut_down = shut_down
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._previous = signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Puts the previous handler back, unless somebody has replaced this one since."""
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        self._is_installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._shut_down()
        if callable(self._previous):
            self._previous(signum, frame)
        elif self._previous != signal.SIG_IGN:
            raise SystemExit(128 + signum)
