from __future__ import annotations

from diffulex.engine.page_pool import PagePool


def test_pages_are_handed_out_oldest_free_first() -> None:
    pool = PagePool(3)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 2]
    for page in (2, 0, 1):
        pool.release(page)
    assert [pool.take(), pool.take(), pool.take()] == [2, 0, 1]


def test_free_and_owned_pages_add_up() -> None:
    pool = PagePool(3)
    page = pool.take()
    assert (pool.num_free, pool.num_owners(page), pool.is_free(page)) == (2, 1, False)
    pool.share(page)
    assert (pool.num_free, pool.num_owners(page)) == (2, 2)
    pool.release(page)
    assert (pool.num_free, pool.num_owners(page), pool.is_free(page)) == (2, 1, False)
    pool.release(page)
    assert (pool.num_free, pool.num_owners(page), pool.is_free(page)) == (3, 0, True)


def test_a_free_page_stays_findable_until_it_is_handed_out() -> None:
    pool = PagePool(2)
    page = pool.take()
    entry = pool.register(page, b"digest", b"tokens", None)
    pool.release(page)
    assert pool.find(b"digest", b"tokens", None) is entry
    assert pool.take() == 1
    assert pool.find(b"digest", b"tokens", None) is entry
    assert pool.take() == page
    assert pool.find(b"digest", b"tokens", None) is None


def test_a_found_page_leaves_the_free_list_when_it_is_shared() -> None:
    pool = PagePool(2)
    page = pool.take()
    pool.register(page, b"digest", b"tokens", None)
    pool.release(page)
    pool.share(page)
    assert pool.num_free == 1
    assert pool.take() == 1


def test_a_hit_needs_equal_tokens_and_the_same_parent() -> None:
    pool = PagePool(3)
    root = pool.register(pool.take(), b"root", b"first", None)
    child = pool.register(pool.take(), b"child", b"second", root)
    assert pool.find(b"child", b"second", root) is child
    assert pool.find(b"child", b"other", root) is None
    assert pool.find(b"child", b"second", None) is None
    assert pool.find(b"unknown", b"second", root) is None


def test_equal_content_that_is_registered_already_wins() -> None:
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    entry = pool.register(first, b"digest", b"tokens", None)
    assert pool.register(second, b"digest", b"tokens", None) is entry
    pool.release(second)
    assert pool.take() == second
    assert pool.find(b"digest", b"tokens", None) is entry


def test_an_equal_digest_of_other_content_replaces_the_older_page() -> None:
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    pool.register(first, b"digest", b"tokens", None)
    newer = pool.register(second, b"digest", b"others", None)
    assert pool.find(b"digest", b"tokens", None) is None
    assert pool.find(b"digest", b"others", None) is newer
    # The older page is forgotten without taking the newer entry with it.
    pool.release(first)
    assert pool.take() == first
    assert pool.find(b"digest", b"others", None) is newer


def test_a_page_that_is_registered_anew_forgets_what_it_held() -> None:
    pool = PagePool(1)
    page = pool.take()
    pool.register(page, b"old", b"tokens", None)
    newer = pool.register(page, b"new", b"others", None)
    assert pool.find(b"old", b"tokens", None) is None
    assert pool.find(b"new", b"others", None) is newer
