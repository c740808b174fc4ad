"""`multi_bd`: block diffusion with one or more open blocks, block-causal, prompt included."""

from diffulex.strategy.multi_bd.engine.kv_cache_manager import MultiBDKVCacheManager
from diffulex.strategy.multi_bd.engine.model_runner import MultiBDModelRunner
from diffulex.strategy.multi_bd.engine.request import MultiBDReq
from diffulex.strategy.multi_bd.engine.scheduler import MultiBDScheduler

__all__ = ["MultiBDKVCacheManager", "MultiBDModelRunner", "MultiBDReq", "MultiBDScheduler"]
