"""Settings of the paged KV cache."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["CacheSettings"]


@dataclass(frozen=True)
class CacheSettings:
    """Pages, their number and their reuse."""

    page_size: int = setting(
        32, help="Tokens in one page of the KV cache; at least block_size.", choices=(4, 8, 16, 32, 256)
    )
    num_pages: int = setting(
        -1,
        help="Pages in the pool; -1 sizes the pool. One request of full length takes "
        "max_model_len / page_size pages, rounded up.",
        low=-1,
    )
    gpu_memory_utilization: float = setting(
        0.9, help="Share of the memory left by the weights that the engine plans for.", above=0, high=1
    )
    enable_prefix_caching: bool = setting(
        True, help="Share cached pages between requests with equal beginnings."
    )
    kv_cache_layout: str = setting(
        "unified",
        help="Order of the cache in memory: a position's heads together, or head by head; tokens stay equal.",
        choices=("unified", "distinct"),
    )
    k_cache_hdim_split_factor_x: int = setting(
        8, help="distinct layout: numbers in one piece of a key; divides the head width.", low=1
    )
