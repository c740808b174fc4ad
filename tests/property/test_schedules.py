"""Whatever arrives, aborts or runs out of pages, each answer equals that of the lonely reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.schedules import EOS_IDS, MASK_ID, VOCAB, Schedule, expected, run_schedule, schedules
from tests.support.checkpoints import write_stub
from tests.support.engines import Harness, Twist

if TYPE_CHECKING:
    from collections.abc import Iterator


#: These are quick: 2,100 schedules in the short run, more than 10,000 in the long one.
many = settings(max_examples=3500 if settings.default.max_examples >= 1000 else 700)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stub")
    return str(write_stub(folder, VOCAB, mask_id=MASK_ID, eos_ids=EOS_IDS))


@pytest.fixture(autouse=True)
def restore_twist() -> Iterator[None]:
    yield
    Twist.shift, Twist.always_force, Twist.sharpness, Twist.table = False, False, 1.0, None


def harness_for(schedule: Schedule, stub: str, **changes: Any) -> Harness:
    Twist.shift, Twist.always_force = schedule.shift, schedule.always_force
    Twist.sharpness, Twist.table = schedule.sharpness, None
    return Harness(model=stub, **schedule.settings(**changes))


@many
@given(schedule=schedules())
def test_answers_equal_the_reference_and_invariants_hold_after_every_step(
    schedule: Schedule, stub: str
) -> None:
    harness = harness_for(schedule, stub)
    requests = run_schedule(harness, schedule)
    for req, arrival in zip(requests, schedule.arrivals, strict=True):
        if req.completion_reason == "aborted":
            assert MASK_ID not in req.output_ids()
            continue
        wanted = expected(schedule, arrival)
        assert req.output_ids() == wanted.output_ids
        assert req.completion_reason == wanted.reason
        assert req.nfe.denoise == wanted.num_denoise
        assert harness.accepted[req.req_id] == wanted.accepted
        assert len(req.output_ids()) <= arrival.max_tokens
        assert req.num_prompt + len(req.output_ids()) <= schedule.max_model_len


@many
@given(schedule=schedules(switches=True, aborts=False))
def test_switching_accelerations_off_costs_forwards_but_no_tokens(schedule: Schedule, stub: str) -> None:
    harness = harness_for(schedule, stub)
    requests = run_schedule(harness, schedule)
    fast = harness_for(schedule, stub, **dict.fromkeys(schedule.switches, True))
    quick = run_schedule(fast, schedule, check=False)
    for req, other, arrival in zip(requests, quick, schedule.arrivals, strict=True):
        wanted = expected(schedule, arrival)
        assert req.output_ids() == other.output_ids() == wanted.output_ids
        assert req.completion_reason == other.completion_reason == wanted.reason
        assert other.nfe.denoise <= req.nfe.denoise


@many
@given(schedule=schedules(aborts=False), data=st.data())
def test_cache_pages_order_and_batch_size_change_nothing(
    schedule: Schedule, stub: str, data: st.DataObject
) -> None:
    base = run_schedule(harness_for(schedule, stub), schedule, check=False)
    wanted = [(req.output_ids(), req.completion_reason, req.nfe.denoise) for req in base]
    sizes = [size for size in (4, 8, 16, 32) if size >= schedule.block_size]
    changes = {
        "enable_prefix_caching": not schedule.prefix_caching,
        "page_size": data.draw(st.sampled_from(sizes)),
        "max_num_reqs": data.draw(st.integers(1, 8)),
        "num_pages": 400,
    }
    order = data.draw(st.permutations(range(len(schedule.arrivals))))
    harness = harness_for(schedule, stub, **changes)
    for index in order:
        arrival = schedule.arrivals[index]
        harness.add(arrival.prompt, max_tokens=arrival.max_tokens)
    harness.run()
    got = {index: harness.requests[place] for place, index in enumerate(order)}
    for index, expectation in enumerate(wanted):
        req = got[index]
        assert (req.output_ids(), req.completion_reason, req.nfe.denoise) == expectation
