"""Which request owns which KV page: growth, release, and reuse of prefixes that are stored already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.engine.page_pool import CachedPage, PagePool
from diffulex.utils.hashing import page_digest, root_digest
from diffulex.utils.registry import Registry

if TYPE_CHECKING:
    from diffulex.config import Config
    from diffulex.engine.request import MultiBlockReqTemplate


class KVCacheManagerBase:
    """Base of the registered managers; owns the page pool.

    Raises:
        ValueError: the configuration leaves the number of pages open.
    """

    def __init__(self, config: Config) -> None:
        if config.num_pages <= 0:
            raise ValueError(
                "num_pages must be decided before the KV cache manager is made; plan memory first"
            )
        self.page_size = config.page_size
        self.pool = PagePool(config.num_pages)


class MultiBlockKVCacheManagerTemplate(KVCacheManagerBase):
    """Page ``j`` of a request holds positions ``[j * page_size, (j + 1) * page_size)``.

    Only final positions are stored, so a page whose positions are all stored never changes again and can be
    shared with every request that begins with the same tokens.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reuses_prefixes = config.enable_prefix_caching
        self._root = root_digest(
            str(config.model), config.decoding_strategy, str(config.block_size), str(config.page_size)
        )
        self._chains: dict[int, list[CachedPage]] = {}

    def num_pages_for(self, end: int) -> int:
        """Pages that cover positions ``[0, end)``."""
        return -(-end // self.page_size)

    def num_missing(self, req: MultiBlockReqTemplate, end: int) -> int:
        """Pages `req` lacks to store ``[0, end)``."""
        return max(self.num_pages_for(end) - len(req.pages), 0)

    def can_grow(self, req: MultiBlockReqTemplate, end: int) -> bool:
        """True when the free pages suffice for `req` to store ``[0, end)``."""
        return self.num_missing(req, end) <= self.pool.num_free

    def grow(self, req: MultiBlockReqTemplate, end: int) -> None:
        """Gives `req` the pages it lacks to store ``[0, end)``."""
        for _ in range(self.num_missing(req, end)):
            req.pages.append(self.pool.take())

    def find_prefix(self, req: MultiBlockReqTemplate) -> list[CachedPage]:
        """The longest run of stored pages, from page 0, with the tokens of `req`; takes nothing."""
        chain: list[CachedPage] = []
        if not self.reuses_prefixes:
            return chain
        size = self.page_size
        for page in range(req.reusable_end // size):
            tokens = req.tokens[page * size : (page + 1) * size].tobytes()
            parent = chain[-1] if chain else None
            digest = page_digest(self._salt(req) if parent is None else parent.digest, tokens)
            found = self.pool.find(digest, tokens, parent)
            if found is None:
                break
            chain.append(found)
        return chain

    def num_free_without(self, chain: list[CachedPage]) -> int:
        """Free pages that remain once the pages of `chain` are in use."""
        return self.pool.num_free - sum(self.pool.is_free(entry.page) for entry in chain)

    def adopt(self, req: MultiBlockReqTemplate, chain: list[CachedPage]) -> int:
        """Makes the pages of `chain` the first pages of `req`; returns the positions they hold."""
        for entry in chain:
            self.pool.share(entry.page)
            req.pages.append(entry.page)
        self._chains[req.req_id] = chain
        return len(chain) * self.page_size

    def register_stored(self, req: MultiBlockReqTemplate) -> None:
        """Makes every full page that `req` has stored findable; generated text included."""
        if not self.reuses_prefixes:
            return
        size, chain = self.page_size, self._chains[req.req_id]
        for page in range(len(chain), req.stored_end // size):
            tokens = req.tokens[page * size : (page + 1) * size].tobytes()
            parent = chain[-1] if chain else None
            digest = page_digest(self._salt(req) if parent is None else parent.digest, tokens)
            chain.append(self.pool.register(req.pages[page], digest, tokens, parent))

    def free(self, req: MultiBlockReqTemplate) -> None:
        """Takes all pages away from `req`, last page first, so that long prefixes are kept longest."""
        for page in reversed(req.pages):
            self.pool.release(page)
        req.pages.clear()
        self._chains.pop(req.req_id, None)

    def _salt(self, req: MultiBlockReqTemplate) -> bytes:
        salt = req.sampling_params.cache_salt
        return self._root if salt is None else page_digest(self._root, salt.encode())


class _KVCacheManagerRegistry(Registry[KVCacheManagerBase]):
    """KV cache managers by decoding strategy."""


AutoKVCacheManager: _KVCacheManagerRegistry = _KVCacheManagerRegistry("KV cache manager", KVCacheManagerBase)
