"""Ranks 1 and above of a tensor-parallel engine: their processes, what they are fed, how they end.

Rank 0 lives in the engine's process. Before each forward it sends the packed batch to every worker; all ranks
then make the same calls, so their collectives meet. Nothing about requests reaches a worker.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from diffulex.logger import get_logger

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess
    from multiprocessing.synchronize import Event

    from diffulex.config import Config
    from diffulex.mixin.multi_block.batch import BlockBatch

logger = get_logger(__name__)

JOIN_SECONDS = 5.0
JOINING = "joining"
#: A rank that fails takes its peers' collectives down with it; its own message may come a moment later.
GRACE_SECONDS = 3.0


class WorkerError(RuntimeError):
    """A worker failed or died; the message names its rank and holds its traceback if it left one."""


class Workers:
    """The worker processes of one engine; made and used by the engine's process only."""

    def __init__(self, config: Config, module: str) -> None:
        """Starts one process a rank; `module` is imported there so that the strategy is registered."""
        context = multiprocessing.get_context("spawn")
        self.event: Event = context.Event()
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        for rank in range(1, config.tensor_parallel_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_worker,
                args=(config, rank, theirs, self.event, module),
                name=f"diffulex-rank-{rank}",
                daemon=True,
            )
            try:
                process.start()
            except RuntimeError as error:
                raise WorkerError(
                    "tensor_parallel_size above 1 starts processes that import the main script again; put "
                    "what the script does under: if __name__ == '__main__'"
                ) from error
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def wait_until_joining(self) -> None:
        """Returns once every worker is about to join the group, so that rank 0 does not wait in vain.

        Raises:
            WorkerError: a worker failed before that.
        """
        for rank, (process, connection) in enumerate(zip(self._processes, self._connections, strict=True), 1):
            wait([connection, process.sentinel])
            try:
                message = connection.recv()
            except (EOFError, OSError):
                raise WorkerError(
                    f"rank {rank} died while it started, exit code {process.exitcode}"
                ) from None
            if message != JOINING:
                raise WorkerError(f"rank {rank} failed:\n{message}")

    def send(self, batch: BlockBatch) -> None:
        """Hands the batch of the next forward to every worker.

        Raises:
            WorkerError: a worker is gone.
        """
        for connection in self._connections:
            try:
                connection.send(batch)
            except OSError as error:
                raise self.failure(error) from error

    def failure(self, error: BaseException) -> BaseException:
        """What went wrong: the first failed worker's own report, or `error` when all workers are well."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            for rank, (process, connection) in enumerate(
                zip(self._processes, self._connections, strict=True), 1
            ):
                if connection.poll():
                    with suppress(EOFError, OSError):
                        return WorkerError(f"rank {rank} failed:\n{connection.recv()}")
                if not process.is_alive():
                    code = process.exitcode
                    return WorkerError(f"rank {rank} died without a message, exit code {code}")
            wait([process.sentinel for process in self._processes], timeout=0.1)
        return error

    def stop(self) -> None:
        """Ends all workers: asks, then terminates, then kills; returns when none is left."""
        self.event.set()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(JOIN_SECONDS)
            for end in (process.terminate, process.kill):
                if process.is_alive():
                    logger.warning("%s does not end by itself", process.name)
                    end()
                    process.join(JOIN_SECONDS)
        self._processes.clear()
        self._connections.clear()


def run_worker(config: Config, rank: int, connection: Connection, event: Event, module: str) -> None:
    """Body of a worker process: builds its part of the model, then forwards every batch it is sent.

    Ends when the engine closes the connection or dies. Ctrl-C is the engine's business.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name in ("diffulex.strategy", module):
            importlib.import_module(name)
        model_runner = importlib.import_module("diffulex.engine.model_runner")
        connection.send(JOINING)
        runner = model_runner.AutoModelRunner.get(config.decoding_strategy)(config, rank, event)
        _serve(runner, connection)
        runner.exit()
    except BaseException:  # noqa: BLE001  # whatever ended this rank, the engine hears of it
        if not event.is_set():
            _report(connection, traceback.format_exc())
        sys.exit(1)


def _serve(runner: object, connection: Connection) -> None:
    from diffulex.engine.model_runner import MultiBlockModelRunnerTemplate

    if not isinstance(runner, MultiBlockModelRunnerTemplate):
        raise TypeError(f"{type(runner).__name__} is no MultiBlockModelRunnerTemplate")
    while True:
        try:
            batch = connection.recv()
        except EOFError:
            return
        runner.follow(batch)


def _report(connection: Connection, text: str) -> None:
    try:
        connection.send(text)
    except OSError:
        # The engine is gone; nobody is left to tell.
        return
