"""KV cache manager of `multi_bd`."""

from diffulex.engine.kv_cache_manager import AutoKVCacheManager, MultiBlockKVCacheManagerTemplate


@AutoKVCacheManager.register("multi_bd")
class MultiBDKVCacheManager(MultiBlockKVCacheManagerTemplate):
    """The template's own rules; block-causal KV depends on the token prefix alone, so pages are shared."""
