"""What differs between the CPU and CUDA: presence, number formats, memory, synchronization.

torch is imported inside the functions, so that reading settings does not load it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeviceChoice",
    "DeviceFacts",
    "MemoryFacts",
    "device_facts",
    "dtype_for",
    "free_memory",
    "memory_facts",
    "resolve_device",
    "resolve_dtype",
    "synchronize",
]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The CUDA devices this process sees. `cuda_built` says whether the installed torch knows CUDA at all."""

    has_cuda: bool
    device_count: int
    cuda_built: bool
    names: tuple[str, ...] = ()


class DeviceChoice(Protocol):
    """The settings that decide on device and number format; `Config` has them."""

    @property
    def device(self) -> str:
        """Either cpu or cuda."""

    @property
    def dtype(self) -> str:
        """One of float32, bfloat16 and float16."""

    @property
    def device_start(self) -> int:
        """First device index while `device_ids` is empty."""

    @property
    def device_ids(self) -> tuple[int, ...]:
        """Device index of each rank."""


@cache
def device_facts() -> DeviceFacts:
    """The CUDA devices of this machine, looked up once."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = tuple(torch.cuda.get_device_name(index) for index in range(count))
    return DeviceFacts(count > 0, count, torch.version.cuda is not None, names)


def resolve_device(choice: DeviceChoice, rank: int = 0) -> torch.device:
    """The torch device of a rank."""
    import torch

    if choice.device == "cpu":
        return torch.device("cpu")
    index = choice.device_ids[rank] if choice.device_ids else choice.device_start + rank
    return torch.device("cuda", index)


def dtype_for(device: str, checkpoint_dtype: str | None) -> str:
    """The number format meant by "auto": float32 on the CPU, the checkpoint's own on CUDA."""
    known = ("float32", "bfloat16", "float16")
    if device == "cpu":
        return "float32"
    return checkpoint_dtype if checkpoint_dtype in known else "bfloat16"


def resolve_dtype(choice: DeviceChoice, checkpoint_dtype: str | None = None) -> torch.dtype:
    """The torch number format that weights and cache use."""
    import torch

    name = dtype_for(choice.device, checkpoint_dtype) if choice.dtype == "auto" else choice.dtype
    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return formats[name]


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of a device in bytes; `used` counts every process."""

    total: int
    free: int

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self.total - self.free


def memory_facts(device: torch.device) -> MemoryFacts:
    """Total and free bytes of a CUDA device, or of this machine's main memory."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryFacts(total, free)
    page = os.sysconf("SC_PAGE_SIZE")
    return MemoryFacts(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page)


def free_memory(device: torch.device) -> int:
    """Free bytes of a CUDA device, or of this machine's main memory."""
    return memory_facts(device).free


def synchronize(device: torch.device) -> None:
    """Returns once all work queued on `device` is done; at once on the CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
