"""Which pages a request finds stored already, and which it never may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.engine import kv_cache_manager
from diffulex.engine.kv_cache_manager import KVCacheManagerBase
from diffulex.utils.hashing import page_digest, root_digest
from tests.support.engines import Twist
from tests.support.tables import hash_harness, table, table_harness

if TYPE_CHECKING:
    from tests.support.engines import FakeReq, Harness

PROMPT = [3 + place % 17 for place in range(19)]


def play(harness: Harness, prompt: list[int], **params: Any) -> FakeReq:
    req = harness.add(prompt, **{"max_tokens": 8, **params})
    harness.run()
    return req


def test_a_second_request_finds_all_whole_pages_of_the_prompt(stub: str) -> None:
    harness = hash_harness(stub)
    first, second = play(harness, PROMPT), play(harness, PROMPT)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert second.output_ids() == first.output_ids()
    assert second.nfe.denoise == first.nfe.denoise
    assert second.num_forward_tokens == first.num_forward_tokens - 16


@pytest.mark.parametrize(("changed", "cached"), [(0, 0), (7, 4), (8, 8), (15, 12), (16, 16)])
def test_a_hit_ends_before_the_first_page_that_differs(stub: str, changed: int, cached: int) -> None:
    harness = hash_harness(stub)
    play(harness, PROMPT)
    other = list(PROMPT)
    other[changed] = 21
    lonely = play(hash_harness(stub), other)
    req = play(harness, other)
    assert req.num_cached_tokens == cached
    assert req.output_ids() == lonely.output_ids()


def test_a_page_larger_than_a_block_is_only_reused_whole(stub: str) -> None:
    harness = hash_harness(stub, page_size=16)
    play(harness, PROMPT[:15])
    assert play(harness, PROMPT[:15]).num_cached_tokens == 0
    play(harness, PROMPT)
    assert play(harness, PROMPT).num_cached_tokens == 16


def test_a_prompt_of_whole_pages_is_served_fully_from_the_cache(stub: str) -> None:
    harness = hash_harness(stub)
    first, second = play(harness, PROMPT[:16]), play(harness, PROMPT[:16])
    assert second.num_cached_tokens == 16
    assert second.output_ids() == first.output_ids()


def test_families_with_shifted_logits_recompute_the_last_prompt_position(stub: str) -> None:
    Twist.shift = True
    harness = hash_harness(stub)
    first, second = play(harness, PROMPT[:16]), play(harness, PROMPT[:16])
    assert second.num_cached_tokens == 12
    assert second.output_ids() == first.output_ids()
    assert play(harness, PROMPT[:17]).num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_found(stub: str) -> None:
    harness = hash_harness(stub, enable_prefix_caching=False)
    play(harness, PROMPT)
    assert play(harness, PROMPT).num_cached_tokens == 0


def test_a_salt_separates_requests_and_joins_those_that_share_it(stub: str) -> None:
    harness = hash_harness(stub)
    play(harness, PROMPT)
    assert play(harness, PROMPT, cache_salt="a").num_cached_tokens == 0
    assert play(harness, PROMPT, cache_salt="a").num_cached_tokens == 16
    assert play(harness, PROMPT, cache_salt="b").num_cached_tokens == 0
    assert play(harness, PROMPT).num_cached_tokens == 16


@pytest.mark.parametrize(("page_size", "cached"), [(4, 36), (8, 32), (16, 32), (32, 32)])
def test_generated_pages_are_reused_in_a_second_turn(stub: str, page_size: int, cached: int) -> None:
    harness = hash_harness(stub, page_size=page_size)
    first = play(harness, PROMPT, max_tokens=21, ignore_eos=True)
    turn = [*PROMPT, *first.output_ids(), 7, 8]
    # Positions up to 40 are answered; the last block was never stored.
    assert first.output_ids() == play(hash_harness(stub), PROMPT, max_tokens=21, ignore_eos=True).output_ids()
    second = play(harness, turn)
    assert second.num_cached_tokens == cached
    assert second.output_ids() == play(hash_harness(stub), turn).output_ids()


def test_with_the_final_store_the_last_block_is_reused_too(stub: str) -> None:
    harness = hash_harness(stub, skip_final_store=False)
    first = play(harness, PROMPT, max_tokens=21, ignore_eos=True)
    assert first.nfe.store == 1
    second = play(harness, [*PROMPT, *first.output_ids(), 7, 8])
    assert second.num_cached_tokens == 40


def test_cached_tokens_are_counted_at_the_first_admission_only(stub: str) -> None:
    harness = hash_harness(stub, accept_threshold=1.0)
    req = harness.add(PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(7):
        harness.step()
    harness.scheduler.preempt(req)
    harness.step()
    # It comes back with the pages that it stored itself.
    assert (harness.plans[-1].spans[0].start, req.num_cached_tokens) == (24, 0)
    harness.run()


def test_two_equal_prompts_that_arrive_together_share_nothing_unsafe(stub: str) -> None:
    harness = hash_harness(stub)
    pair = [harness.add(PROMPT, max_tokens=8) for _ in range(2)]
    harness.run()
    assert pair[0].output_ids() == pair[1].output_ids()
    assert [req.num_cached_tokens for req in pair] == [0, 0]
    # Content that two requests stored is registered once, and found.
    assert play(harness, PROMPT).num_cached_tokens == 16


def test_content_goes_with_the_page_that_is_handed_out_again(stub: str) -> None:
    # A request of 19 + 8 tokens needs six pages; five hold its stored part.
    harness = hash_harness(stub, num_pages=8)
    play(harness, PROMPT)
    other = [22 - token for token in PROMPT]
    play(harness, other)
    # The first request's early pages were released last and survive longest.
    assert play(harness, other).num_cached_tokens == 16
    assert play(harness, PROMPT).num_cached_tokens < 16


def test_the_longest_prefix_is_kept_longest(stub: str) -> None:
    harness = hash_harness(stub, num_pages=7)
    play(harness, PROMPT, max_tokens=5, ignore_eos=True)
    # Takes three pages: the two never used ones and the last one of the first request.
    play(harness, [20, 21] * 6, max_tokens=2, ignore_eos=True)
    assert play(harness, PROMPT, max_tokens=5, ignore_eos=True).num_cached_tokens == 16


def test_b28_equal_digests_of_other_tokens_never_share_pages(
    stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [play(hash_harness(stub), prompt).output_ids() for prompt in (PROMPT, PROMPT[::-1])]
    monkeypatch.setattr(kv_cache_manager, "page_digest", lambda *_: b"same")
    harness = hash_harness(stub)
    for _ in range(2):
        for prompt, output in zip((PROMPT, PROMPT[::-1]), wanted, strict=True):
            assert play(harness, prompt).output_ids() == output
    # With one digest for everything at most one page can be found, and only with its own tokens.
    assert all(req.num_cached_tokens in {0, 4} for req in harness.requests)


def test_the_root_of_the_chain_tells_models_and_block_sizes_apart() -> None:
    roots = {
        root_digest(*facts)
        for facts in (("m", "s", "4", "8"), ("m", "s", "8", "8"), ("n", "s", "4", "8"), ("ms", "", "4", "8"))
    }
    assert len(roots) == 4
    assert all(len(root) == 16 for root in roots)


def test_a_page_digest_depends_on_the_prefix_and_on_the_tokens() -> None:
    digests = {page_digest(parent, tokens) for parent in (b"a" * 16, b"b" * 16) for tokens in (b"x", b"y")}
    assert len(digests) == 4


def test_a_manager_needs_the_number_of_pages(stub: str) -> None:
    config = table_harness(stub, table({})).config
    with pytest.raises(ValueError, match="num_pages must be decided"):
        KVCacheManagerBase(type(config)(**{**config.as_dict(), "num_pages": -1}))


def test_pages_of_other_models_strategies_and_sizes_have_other_digests(stub: str) -> None:
    base = hash_harness(stub).scheduler.kv_cache_manager
    req = hash_harness(stub).add(PROMPT)
    others = [hash_harness(stub, block_size=8, page_size=8), hash_harness(stub, page_size=16)]
    digests = {manager._salt(req) for manager in (base, *(one.scheduler.kv_cache_manager for one in others))}
    assert len(digests) == 3
