"""Starts and ends the process group of a tensor-parallel model; finds the port where its ranks meet."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from diffulex.distributed.state import SINGLE, ParallelState

if TYPE_CHECKING:
    from collections.abc import Collection


class GroupSettings(Protocol):
    """The settings of a process group; `Config` has them."""

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks."""

    @property
    def master_addr(self) -> str:
        """Address where the ranks meet."""

    @property
    def master_port(self) -> int:
        """Port where the ranks meet."""

    @property
    def distributed_backend(self) -> str:
        """``gloo`` or ``nccl``."""

    @property
    def distributed_timeout_seconds(self) -> int:
        """Seconds that a collective operation may take."""

    @property
    def explicit(self) -> Collection[str]:
        """Settings the user wrote."""


class PortInUseError(ValueError):
    """The port that the user wrote is taken."""


#: Where the ranks of this process's group meet; the process of rank 0 listens, the others connect.
_store: Any = None


def open_meeting_place(settings: GroupSettings) -> int:
    """Listens at ``master_port``, or at a free port when it is taken and the user did not write it.

    Called by the process of rank 0 before it starts the others, so that nobody can take the port in between.

    Returns:
        The port.

    Raises:
        PortInUseError: the port is taken and the user wrote it.
        RuntimeError: this process already belongs to a group.
    """
    global _store
    if dist.is_initialized():
        raise RuntimeError(
            "another tensor-parallel engine runs in this process; exit() it first or use another process"
        )
    try:
        _store = _make_store(settings, settings.master_port, listens=True)
    except RuntimeError as error:
        if "master_port" in settings.explicit:
            raise PortInUseError(
                f"master_port {settings.master_port} is in use; write another one or leave it unset "
                "to take a free one"
            ) from error
        _store = _make_store(settings, 0, listens=True)
    port: int = _store.port
    return port


def start_group(settings: GroupSettings, rank: int) -> ParallelState:
    """Joins the group of the model as `rank`; returns once all ranks are there.

    Raises:
        RuntimeError: a rank does not come in time.
    """
    if settings.tensor_parallel_size == 1:
        return SINGLE
    store = _store if rank == 0 else _make_store(settings, settings.master_port, listens=False)
    dist.init_process_group(
        settings.distributed_backend,
        store=store,
        world_size=settings.tensor_parallel_size,
        rank=rank,
        timeout=timedelta(seconds=settings.distributed_timeout_seconds),
    )
    return ParallelState(settings.tensor_parallel_size, rank)


def _make_store(settings: GroupSettings, port: int, *, listens: bool) -> Any:
    # Public, but torch's type stubs do not list it.
    return dist.TCPStore(  # type: ignore[attr-defined]
        settings.master_addr,
        port,
        settings.tensor_parallel_size,
        is_master=listens,
        timeout=timedelta(seconds=settings.distributed_timeout_seconds),
        wait_for_workers=False,
    )


def stop_group(parallel: ParallelState) -> None:
    """Leaves the group and the place where it met; does nothing at size 1."""
    if parallel.size > 1:
        if dist.is_initialized():
            dist.destroy_process_group()
        close_meeting_place()


def close_meeting_place() -> None:
    """Frees the port."""
    global _store
    _store = None
