"""Whether weights, KV cache and logits fit the main memory and each GPU, by the engine's own formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from diffulex.config import ConfigError
from diffulex.engine.memory import CacheShape, MemorySettings, divide_memory
from diffulex.utils.device import device_facts, dtype_for, memory_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.utils.device import MemoryFacts
    from diffulex_bench.inspection.shape import CacheLayer, ModelSize

__all__ = ["ITEM_SIZES", "Fit", "Need", "Place", "cache_shape", "places", "weigh"]

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

Verdict = Literal["fits", "fits fewer requests", "does not fit"]


@dataclass(frozen=True, slots=True)
class Place:
    """A memory to fit into: the host's, or that of one GPU; `kind` is cpu or cuda, sizes are bytes."""

    name: str
    kind: str
    memory: MemoryFacts


@dataclass(frozen=True, slots=True)
class Need:
    """What a model needs wherever it runs.

    `settings` are the lengths and counts asked about, `num_ranks` the devices that share one copy.
    """

    size: ModelSize
    layers: Sequence[CacheLayer]
    vocab_size: int
    settings: MemorySettings
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What one place can hold; all sizes in bytes.

    `wanted_*` is what all requests of full length would use; `num_pages` and `requests_at_once` are what
    there is room for. `reason` says what stands in the way of a start.
    """

    place: str
    total_bytes: int
    free_bytes: int
    dtype: str
    weight_bytes: int
    wanted_pages: int
    wanted_cache_bytes: int
    num_pages: int
    logits_rows: int
    logits_bytes: int
    requests_at_once: int
    verdict: Verdict
    reason: str | None = None


def cache_shape(layers: Sequence[CacheLayer], itemsize: int, num_ranks: int = 1) -> CacheShape:
    """Keys and values that one of `num_ranks` ranks keeps, in numbers of `itemsize` bytes."""
    from diffulex.attention.cache_layout import KVShape  # imports torch

    shapes = (KVShape(-(-one.num_kv_heads // num_ranks), one.head_dim) for one in layers)
    return CacheShape(tuple(shapes), itemsize)


def places() -> list[Place]:
    """The main memory and every GPU, as they are now."""
    import torch

    found = [Place("host", "cpu", memory_facts(torch.device("cpu")))]
    for index, name in enumerate(device_facts().names):
        found.append(Place(f"cuda:{index} {name}", "cuda", memory_facts(torch.device("cuda", index))))
    return found


def weigh(need: Need, place: Place, dtype: str, checkpoint_dtype: str | None) -> Fit:
    """What `place` can hold of `need`; a `dtype` of auto means what a run there would take."""
    dtype = dtype_for(place.kind, checkpoint_dtype) if dtype == "auto" else dtype
    itemsize = ITEM_SIZES[dtype]
    weight_bytes = need.size.bytes_of_rank(itemsize, need.num_ranks)
    shape = cache_shape(need.layers, itemsize, need.num_ranks)
    settings = need.settings
    per_request = -(-settings.max_model_len // settings.page_size)
    wanted = settings.num_pages if settings.num_pages > 0 else settings.max_num_reqs * per_request
    free = place.memory.free
    # All ranks of one host share its main memory, weights included.
    share = free // need.num_ranks if place.kind == "cpu" else free
    num_pages = rows = logits_bytes = 0
    reason = None
    if weight_bytes >= share:
        reason = "the weights alone exceed what is free; use a smaller dtype or share them among more devices"
    else:
        try:
            plan = divide_memory(settings, shape, need.vocab_size, share - weight_bytes)
        except ConfigError as error:
            reason = str(error)
        else:
            num_pages, rows, logits_bytes = plan.num_pages, plan.max_logits_rows, plan.logits_bytes
    at_once = min(num_pages // per_request, settings.max_num_reqs)
    if reason is not None:
        verdict: Verdict = "does not fit"
    else:
        verdict = "fits" if at_once == settings.max_num_reqs else "fits fewer requests"
    return Fit(
        place=place.name,
        total_bytes=place.memory.total,
        free_bytes=free,
        dtype=dtype,
        weight_bytes=weight_bytes,
        wanted_pages=wanted,
        wanted_cache_bytes=wanted * shape.bytes_per_token * settings.page_size,
        num_pages=num_pages,
        logits_rows=rows,
        logits_bytes=logits_bytes,
        requests_at_once=at_once,
        verdict=verdict,
        reason=reason,
    )
