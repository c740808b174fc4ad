from __future__ import annotations

import os
import signal
import threading

import pytest

from diffulex.engine.signals import TerminationHandler


def test_sigterm_shuts_down_and_exits_when_nobody_else_handles_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    calls: list[str] = []
    handler = TerminationHandler(lambda: calls.append("down"))
    with pytest.raises(SystemExit) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    handler.remove()
    assert caught.value.code == 128 + signal.SIGTERM
    assert calls == ["down"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_passes_on_to_the_handler_that_was_there_before() -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("outer"))
    try:
        handler = TerminationHandler(lambda: calls.append("down"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == ["down", "outer"]
        handler.remove()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_replaced_ours_stays_after_removal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handler = TerminationHandler(lambda: None)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        handler.remove()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_engine_made_in_a_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers: list[TerminationHandler] = []
    thread = threading.Thread(target=lambda: handlers.append(TerminationHandler(lambda: None)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    handlers[0].remove()
    assert signal.getsignal(signal.SIGTERM) == before
