"""How many KV pages fit beside the model and the logits, decided before the first request, with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from diffulex.config import ConfigError
from diffulex.logger import get_logger

if TYPE_CHECKING:
    from diffulex.attention.cache_layout import KVShape

logger = get_logger(__name__)

#: Sampled rows whose logits exist at one time, if memory allows; more gain nothing on any device tried.
MAX_LOGITS_ROWS = 4096
#: A float32 copy, a masked copy and a work buffer exist beside the model's own logits.
LOGITS_COPIES = 4
GIB = 2**30


class MemorySettings(Protocol):
    """The settings that decide what is needed; `Config` has them."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""

    @property
    def max_num_reqs(self) -> int:
        """Requests that run at once."""

    @property
    def block_size(self) -> int:
        """Tokens of one block."""

    @property
    def buffer_size(self) -> int:
        """Blocks of one request that are open at once."""

    @property
    def page_size(self) -> int:
        """Tokens of one page."""

    @property
    def num_pages(self) -> int:
        """Pages, -1 for as many as are of use."""

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of the available bytes to plan for."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one position costs: KV heads of this rank and head width of each layer, bytes of one number."""

    layers: tuple[KVShape, ...]
    itemsize: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one position over all layers."""
        return 2 * self.itemsize * sum(layer.num_kv_heads * layer.head_dim for layer in self.layers)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of the KV cache, rows of logits held at one time, and what both cost in bytes."""

    num_pages: int
    max_logits_rows: int
    cache_bytes: int
    logits_bytes: int


def plan_memory(config: MemorySettings, shape: CacheShape, vocab_size: int, available: int) -> MemoryPlan:
    """Divides `available` bytes as `divide_memory` does, and tells the log about it."""
    plan = divide_memory(config, shape, vocab_size, available)
    logger.info(
        "memory: %d pages of %d tokens (%.2f GiB KV), logits for %d rows at a time (%.2f GiB)",
        plan.num_pages,
        config.page_size,
        plan.cache_bytes / GIB,
        plan.max_logits_rows,
        plan.logits_bytes / GIB,
    )
    return plan


def divide_memory(config: MemorySettings, shape: CacheShape, vocab_size: int, available: int) -> MemoryPlan:
    """Divides `available` bytes (what is free once the weights are loaded) among logits and pages.

    At most ``gpu_memory_utilization`` of it is planned for. Without ``num_pages`` the pool gets what the
    configured requests could ever use, or what is left.

    Raises:
        ConfigError: the rows of one block, or the pages of one request of full length, do not fit.
    """
    budget = int(available * config.gpu_memory_utilization)
    rows_live = config.max_num_reqs * config.buffer_size * config.block_size
    row_bytes = LOGITS_COPIES * vocab_size * 4
    max_rows = min(MAX_LOGITS_ROWS, rows_live)
    # Logits may take a fifth of the budget; fewer rows at a time only mean more pieces.
    max_rows = max(min(max_rows, budget // 5 // row_bytes), config.block_size)
    logits_bytes = max_rows * row_bytes
    page_bytes = shape.bytes_per_token * config.page_size
    per_request = -(-config.max_model_len // config.page_size)
    unlimited = max(config.num_pages, config.max_num_reqs * per_request)
    pages_left = (budget - logits_bytes) // page_bytes if page_bytes else unlimited
    if config.num_pages > 0:
        num_pages, wanted = config.num_pages, config.num_pages
    else:
        wanted = config.max_num_reqs * per_request
        num_pages = min(wanted, pages_left)
    if num_pages > pages_left or (config.num_pages <= 0 and num_pages < per_request):
        needed = max(num_pages, per_request) if config.num_pages <= 0 else wanted
        raise ConfigError(
            [_shortage(config, needed, page_bytes, (max_rows, vocab_size), pages_left, available)]
        )
    return MemoryPlan(num_pages, max_rows, num_pages * page_bytes, logits_bytes)


def _shortage(
    config: MemorySettings,
    needed: int,
    page_bytes: int,
    logits: tuple[int, int],
    pages_left: int,
    available: int,
) -> str:
    rows, vocab_size = logits
    return (
        f"memory does not suffice: {needed} KV pages of {page_bytes / 2**20:.2f} MiB and logits of {rows} "
        f"rows x {vocab_size} ids ({rows * vocab_size * 4 * LOGITS_COPIES / GIB:.2f} GiB) are needed, "
        f"gpu_memory_utilization {config.gpu_memory_utilization} of {available / GIB:.2f} GiB free leaves "
        f"room for {max(pages_left, 0)} pages; lower max_model_len, max_num_reqs or num_pages, or raise "
        "gpu_memory_utilization"
    )
