"""Who runs, who waits, who loses pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.engine.plan import ForwardKind
from diffulex.engine.request import ReqStatus
from tests.support.engines import FakeReq
from tests.support.tables import hash_harness, table, table_harness

if TYPE_CHECKING:
    from tests.support.engines import Harness

SLOW = table({}, rest=(5, 0.3))  # one position a forward


def ids(harness: Harness) -> list[int]:
    """Requests of the last forward, in order."""
    return [span.req.req_id for span in harness.plans[-1].spans]


def running(harness: Harness) -> list[int]:
    return [req.req_id for req in harness.scheduler.running]


def waiting(harness: Harness) -> list[int]:
    return [req.req_id for req in harness.scheduler.waiting]


def test_requests_start_in_the_order_of_their_arrival(stub: str) -> None:
    harness = table_harness(stub, SLOW, max_num_reqs=2)
    for _ in range(4):
        harness.add([7] * 4, max_tokens=4, ignore_eos=True)
    harness.step()
    assert (ids(harness), running(harness), waiting(harness)) == ([0, 1], [0, 1], [2, 3])
    for _ in range(3):
        harness.step()
    # Both have ended; their places go to the next two.
    assert running(harness) == []
    harness.step()
    assert (ids(harness), waiting(harness)) == ([2, 3], [])


def test_a_place_that_becomes_free_is_taken_in_the_next_step(stub: str) -> None:
    harness = table_harness(stub, SLOW, max_num_reqs=2)
    harness.add([7] * 4, max_tokens=2)
    harness.add([7] * 4, max_tokens=12)
    harness.add([7] * 4, max_tokens=4)
    while 0 in running(harness) or not harness.plans:
        harness.step()
    harness.step()
    assert ids(harness) == [1, 2]
    assert sorted(req.slot for req in harness.scheduler.running) == [0, 1]


def test_prefill_and_decoding_share_a_forward(stub: str) -> None:
    harness = table_harness(stub, SLOW)
    harness.add([7] * 4, max_tokens=8)
    harness.step()
    harness.add([8] * 9, max_tokens=8)
    harness.step()
    (first, second) = harness.plans[-1].spans
    assert (first.start, first.end, second.start, second.end) == (4, 8, 0, 12)
    assert harness.plans[-1].num_rows == 16


def test_the_token_budget_ends_admission_and_nobody_is_skipped(stub: str) -> None:
    harness = table_harness(stub, SLOW, max_model_len=32, max_num_batched_tokens=32)
    harness.add([7] * 20, max_tokens=4)
    harness.add([7] * 9, max_tokens=4)
    harness.add([8], max_tokens=2)
    harness.step()
    # 24 rows, then 8 of the second request's 12; the third waits although its 4 rows would fit later.
    assert [span.num_rows for span in harness.plans[0].spans] == [24, 8]
    assert harness.plans[0].spans[1].samples is False
    assert waiting(harness) == [2]
    harness.step()
    assert [span.num_rows for span in harness.plans[1].spans] == [4, 4, 4]


def test_newcomers_wait_while_a_running_request_does_not_fit_the_budget(stub: str) -> None:
    harness = hash_harness(stub, max_model_len=32, max_num_batched_tokens=32, accept_threshold=1.0)
    harness.add([7] * 16, max_tokens=8)
    harness.run()
    harness.add([9] * 9, max_tokens=8)
    harness.add([9] * 13, max_tokens=8)
    harness.step()
    assert running(harness) == [1, 2]
    # Room for one window of eight and for the four rows of a newcomer whose prompt is stored already.
    harness.scheduler.max_num_batched_tokens = 12
    harness.add([7] * 16, max_tokens=8)
    while not harness.scheduler.is_finished():
        harness.step()
        assert ids(harness) == sorted(ids(harness))
        left_out = [number for number in running(harness) if number not in ids(harness)]
        assert not left_out or not waiting(harness) or min(waiting(harness)) > max(ids(harness))
        assert len(left_out) == 0 or max(ids(harness)) < min(left_out)
    starts = [next(i for i, plan in enumerate(harness.plans) if n in {s.req.req_id for s in plan.spans})
              for n in (1, 2, 3)]  # fmt: skip
    assert starts == sorted(starts)


@pytest.mark.parametrize("budget", [4, 8, 12, 20, 400])
@pytest.mark.parametrize("shift", [False, True])
def test_a_prefill_in_pieces_gives_the_same_tokens(stub: str, budget: int, shift: bool) -> None:
    prompts = [[3 + place % 17 for place in range(length)] for length in (37, 5, 24, 61)]

    def play(limit: int | None) -> tuple[Harness, list[Any]]:
        harness = hash_harness(stub, enable_prefix_caching=False)
        if limit is not None:
            harness.scheduler.max_num_batched_tokens = limit
        for prompt in prompts:
            harness.add(prompt, max_tokens=13)
        harness.run()
        return harness, [(req.output_ids(), req.nfe.denoise) for req in harness.requests]

    harness, outputs = play(budget)
    assert outputs == play(None)[1]
    for plan in harness.plans:
        assert plan.num_rows <= budget or len(plan.spans) == 1
        for span in plan.spans:
            assert span.samples or span.end % 4 == 0
            assert span.samples or span.store_end == span.end


def test_a_prefill_in_pieces_counts_every_piece(stub: str) -> None:
    harness = table_harness(stub, SLOW, max_model_len=64)
    harness.scheduler.max_num_batched_tokens = 16
    req = harness.add([7] * 40, max_tokens=1)
    harness.run()
    kinds = [(plan.spans[0].start, plan.spans[0].end, plan.spans[0].kind) for plan in harness.plans]
    assert (
        kinds
        == [
            (0, 16, ForwardKind.PREFILL),
            (16, 32, ForwardKind.PREFILL),
            (32, 44, ForwardKind.DENOISE),
            (40, 44, ForwardKind.DENOISE),
            (40, 44, ForwardKind.DENOISE),
            (40, 44, ForwardKind.DENOISE),
        ][: len(kinds)]
    )
    assert (req.nfe.prefill, req.num_forward_tokens) == (2, 44 + 4 * (req.nfe.denoise - 1))


def test_a_window_wider_than_the_budget_still_runs_alone(stub: str) -> None:
    harness = table_harness(stub, SLOW, buffer_size=4, add_block_threshold=0.0)
    req = harness.add([7], max_tokens=16)
    other = harness.add([7], max_tokens=16)
    harness.step()
    harness.scheduler.max_num_batched_tokens = 4
    for _ in range(3):
        harness.step()
        assert ids(harness) == [0]
    harness.run()
    assert req.output_ids() == other.output_ids() == [5] * 16


def test_the_youngest_loses_its_pages_and_comes_back_before_later_arrivals(stub: str) -> None:
    harness = hash_harness(stub, num_pages=9, enable_prefix_caching=False, accept_threshold=1.0)
    for _ in range(2):
        harness.add([7] * 9, max_tokens=19, ignore_eos=True)
    while not harness.requests[1].num_preemptions:
        harness.step()
    assert running(harness) == [0]
    late = harness.add([7] * 2, max_tokens=2)
    assert waiting(harness) == [1, 2]
    assert harness.requests[1].pages == []
    assert harness.requests[1].status is ReqStatus.WAITING
    order: list[int] = []
    while not harness.scheduler.is_finished():
        harness.step()
        order += [number for number in ids(harness) if number not in order]
    assert order.index(1) < order.index(2)
    assert harness.requests[0].num_preemptions == 0
    assert late.completion_reason is not None
    outputs = [req.output_ids() for req in harness.requests[:2]]
    alone = hash_harness(stub, accept_threshold=1.0)
    alone.add([7] * 9, max_tokens=19, ignore_eos=True)
    alone.run()
    assert outputs == [alone.requests[0].output_ids()] * 2
    assert [req.nfe.denoise for req in harness.requests[:2]] == [alone.requests[0].nfe.denoise] * 2


def test_b28_four_requests_in_a_pool_for_one_all_end_and_the_oldest_never_yields(stub: str) -> None:
    # 9 + 19 tokens need seven blocks, six of which are stored; the pool holds 1.2 times that.
    harness = hash_harness(stub, num_pages=7, enable_prefix_caching=False)
    for _ in range(4):
        harness.add([7] * 9, max_tokens=19, ignore_eos=True)
    num_preempted = {req.req_id: 0 for req in harness.requests}
    while not harness.scheduler.is_finished():
        oldest = min((req.req_id for req in harness.scheduler.running), default=None)
        harness.step()
        now = {req.req_id: req.num_preemptions for req in harness.requests}
        assert oldest is None or now[oldest] == num_preempted[oldest]
        num_preempted = now
    outputs = {tuple(req.output_ids()) for req in harness.requests}
    assert len(outputs) == 1
    assert all(req.completion_reason == "max_new_tokens_reached" for req in harness.requests)
    assert sum(num_preempted.values()) > 0


def test_b49_a_request_that_can_never_fit_is_refused_with_both_numbers(stub: str) -> None:
    harness = table_harness(stub, SLOW, num_pages=2)
    with pytest.raises(ValueError, match=r"may need 5 KV pages .*num_pages is 2; raise num_pages") as caught:
        harness.add([7] * 9, max_tokens=15)
    assert "9 prompt tokens, up to 15 new ones" in str(caught.value)
    assert harness.scheduler.is_finished()


def test_b49_what_just_fits_the_pool_is_taken_and_ends(stub: str) -> None:
    # Positions 0 to 11; the last block is never stored.
    harness = table_harness(stub, SLOW, num_pages=2)
    req = harness.add([7] * 5, max_tokens=7)
    harness.run()
    assert req.output_ids() == [5] * 7
    with pytest.raises(ValueError, match="may need 3 KV pages"):
        table_harness(stub, SLOW, num_pages=2, skip_final_store=False).add([7] * 5, max_tokens=7)


def test_one_page_a_running_request_is_kept_back_from_newcomers(stub: str) -> None:
    harness = table_harness(stub, SLOW, num_pages=5, enable_prefix_caching=False)
    harness.add([7] * 8, max_tokens=8)
    harness.step()
    harness.add([7] * 12, max_tokens=4)
    harness.step()
    # Three pages are free and three needed, but the first request needs one of them next.
    assert (running(harness), waiting(harness)) == ([0], [1])
    put_off = harness.requests[1]
    assert (put_off.status, put_off.stored_end, put_off.slot) == (ReqStatus.WAITING, 0, -1)
    harness.run()
    assert all(req.num_preemptions == 0 for req in harness.requests)


def test_cached_pages_that_are_free_count_once_for_a_newcomer(stub: str) -> None:
    harness = table_harness(stub, SLOW, num_pages=6)
    harness.add([9] * 16, max_tokens=4)
    harness.run()
    harness.add([8] * 4, max_tokens=12)
    harness.step()
    # Five pages are free, four of which hold the newcomer's prefix; the fifth is kept back.
    harness.add([9] * 20, max_tokens=4)
    harness.step()
    assert (running(harness), waiting(harness)) == ([1], [2])
    harness.run()
    assert [req.num_preemptions for req in harness.requests] == [0, 0, 0]


def test_a_forward_as_large_as_the_budget_is_not_cut(stub: str) -> None:
    harness = table_harness(stub, SLOW, enable_prefix_caching=False)
    harness.scheduler.max_num_batched_tokens = 12
    harness.add([7] * 8, max_tokens=4)
    harness.step()
    assert [(span.start, span.end, span.samples) for span in harness.plans[0].spans] == [(0, 12, True)]
    harness.scheduler.max_num_batched_tokens = 16
    harness.add([7] * 8, max_tokens=4)
    harness.step()
    assert [(span.start, span.end, span.samples) for span in harness.plans[1].spans] == [
        (8, 12, True),
        (0, 12, True),
    ]


def test_a_prompt_that_may_not_be_split_runs_whole_as_soon_as_it_is_first(
    stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeReq, "can_split_prefill", False)
    harness = table_harness(stub, SLOW, enable_prefix_caching=False)
    harness.scheduler.max_num_batched_tokens = 16
    harness.add([7] * 8, max_tokens=1)
    harness.add([7] * 40, max_tokens=1)
    harness.step()
    assert [(span.start, span.end) for span in harness.plans[0].spans] == [(0, 12)]
    assert waiting(harness) == [1]
    harness.run(max_steps=20)
    (span,) = (span for plan in harness.plans for span in plan.spans if span.req.req_id == 1)
    assert (span.start, span.end, span.samples) == (0, 44, True)


def test_an_abort_frees_pages_at_once_wherever_the_request_is(stub: str) -> None:
    harness = table_harness(stub, SLOW, max_num_reqs=1)
    first, second = (harness.add([7] * 9, max_tokens=9) for _ in range(2))
    harness.step()
    assert harness.pool.num_free == 62
    assert harness.scheduler.abort(second.req_id) is second
    assert harness.scheduler.abort(first.req_id) is first
    assert harness.pool.num_free == 64
    assert harness.scheduler.is_finished()
    assert (first.completion_reason, second.completion_reason) == ("aborted", "aborted")
    assert harness.scheduler.abort(first.req_id) is None
    assert first.slot == -1
    again = harness.add([7] * 9, max_tokens=2)
    harness.run()
    assert again.output_ids() == [5, 5]


def test_a_request_whose_logits_fail_ends_alone_and_its_forward_counts(stub: str) -> None:
    logits = SLOW.clone()
    logits[20] = float("nan")
    harness = table_harness(stub, logits)
    good = harness.add([7] * 4, max_tokens=12)
    bad = harness.add([7] * 17, max_tokens=12)
    finished = harness.step()
    assert finished == []
    while not bad.is_finished:
        harness.step()
    assert bad.completion_reason == "error"
    step = len(harness.plans) - 1
    assert bad.error == f"request 1, step {step}: the logits at position 20 are not finite (NaN or infinity)"
    assert bad.pages == []
    assert bad.nfe.total == sum(bad in [span.req for span in plan.spans] for plan in harness.plans)
    harness.run()
    assert good.output_ids() == [5] * 12


def test_what_else_a_failed_forward_decided_for_a_request_is_thrown_away(stub: str) -> None:
    logits = table({})
    logits[6] = float("nan")
    harness = table_harness(stub, logits)
    req = harness.add([7] * 4, max_tokens=4)
    (ended,) = harness.step()
    assert (ended, harness.accepted[0]) == (req, [[]])
    assert (req.output_ids(), req.num_decoded, req.nfe.denoise) == ([], 0, 1)


def test_nothing_that_can_be_placed_is_reported_as_a_fault(stub: str) -> None:
    harness = table_harness(stub, SLOW, num_pages=4)
    harness.add([7] * 9, max_tokens=4)
    while harness.pool.num_free:
        harness.pool.take()
    with pytest.raises(RuntimeError, match="0 running, 1 waiting, 0 of 4 pages free, budget 512 tokens"):
        harness.scheduler.schedule()


def test_a_step_without_requests_is_empty(stub: str) -> None:
    plan = table_harness(stub, SLOW).scheduler.schedule()
    assert (plan.step_id, plan.spans, plan.num_rows) == (0, (), 0)
