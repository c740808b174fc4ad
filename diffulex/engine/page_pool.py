"""The pool of KV pages: free list, reference counts, and which free or used page holds which prefix."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class CachedPage:
    """Content of a registered page: `tokens` behind the content `parent`. Compared by identity."""

    page: int
    digest: bytes
    tokens: bytes
    parent: CachedPage | None


class PagePool:
    """Hands out pages by number and remembers the content of full ones until they are handed out again.

    A page with no owner keeps its content and stays findable; free pages are reused oldest first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._num_owners = [0] * num_pages
        self._content: list[CachedPage | None] = [None] * num_pages
        self._by_digest: dict[bytes, CachedPage] = {}

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def num_owners(self, page: int) -> int:
        """Page tables that contain `page`."""
        return self._num_owners[page]

    def take(self) -> int:
        """Hands out the page that has been free for longest; its old content is forgotten."""
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._num_owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds an owner to a page found by `find`."""
        if self._num_owners[page] == 0:
            del self._free[page]
        self._num_owners[page] += 1

    def release(self, page: int) -> None:
        """Takes an owner away; without owners the page becomes free but stays findable."""
        self._num_owners[page] -= 1
        if self._num_owners[page] == 0:
            self._free[page] = None

    def is_free(self, page: int) -> bool:
        """True when the page has no owner."""
        return self._num_owners[page] == 0

    def find(self, digest: bytes, tokens: bytes, parent: CachedPage | None) -> CachedPage | None:
        """The page that holds `tokens` behind `parent`; the content is compared, not only the digest."""
        found = self._by_digest.get(digest)
        if found is None or found.tokens != tokens or found.parent is not parent:
            return None
        return found

    def register(self, page: int, digest: bytes, tokens: bytes, parent: CachedPage | None) -> CachedPage:
        """Makes a full, stored page findable; equal content registered before wins."""
        found = self.find(digest, tokens, parent)
        if found is not None:
            return found
        stale = self._by_digest.pop(digest, None)
        if stale is not None:
            self._content[stale.page] = None
        self._forget(page)
        entry = CachedPage(page, digest, tokens, parent)
        self._content[page] = self._by_digest[digest] = entry
        return entry

    def _forget(self, page: int) -> None:
        content = self._content[page]
        if content is not None:
            del self._by_digest[content.digest]
            self._content[page] = None
