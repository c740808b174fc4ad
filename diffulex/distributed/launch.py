"""Starts and ends the process group of a tensor-parallel model; finds the port where its ranks meet."""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

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


def choose_port(settings: GroupSettings) -> int:
    """``master_port``, or a free port when it is taken and the user did not write it.

    Raises:
        PortInUseError: the port is taken and the user wrote it.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind(("", settings.master_port))
        except OSError:
            if "master_port" in settings.explicit:
                raise PortInUseError(
                    f"master_port {settings.master_port} is in use; write another one or leave it unset to "
                    "take a free one"
                ) from None
        else:
            return settings.master_port
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def start_group(settings: GroupSettings, rank: int) -> ParallelState:
    """Joins the group of the model as `rank`; returns once all ranks are there.

    Raises:
        RuntimeError: this process already belongs to a group, or a rank does not come in time.
    """
    if settings.tensor_parallel_size == 1:
        return SINGLE
    if dist.is_initialized():
        raise RuntimeError(
            "another tensor-parallel engine runs in this process; exit() it first or use another process"
        )
    dist.init_process_group(
        settings.distributed_backend,
        init_method=f"tcp://{settings.master_addr}:{settings.master_port}",
        world_size=settings.tensor_parallel_size,
        rank=rank,
        timeout=timedelta(seconds=settings.distributed_timeout_seconds),
    )
    return ParallelState(settings.tensor_parallel_size, rank)


def stop_group(parallel: ParallelState) -> None:
    """Leaves the group; does nothing at size 1."""
    if parallel.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
