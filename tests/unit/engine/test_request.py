"""Blocks of one request: which are open, when the next one opens, what is stored when."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from diffulex.engine.block import BlockStatus, DiffusionBlock
from diffulex.engine.plan import ForwardKind
from diffulex.engine.request import MultiBlockReqTemplate
from diffulex.engine.rules import DecodeRules
from diffulex.sampling_params import SamplingParams
from tests.support.engines import FakeReq, Twist
from tests.support.tables import EOS_IDS, MASK_ID, answer, table, table_harness

if TYPE_CHECKING:
    from tests.support.engines import Harness

SLOW = table({}, rest=(5, 0.3))
FAST = table({})


def spans(harness: Harness) -> list[tuple[int, int, int]]:
    """Start, end and stored end of the only request's part in each forward."""
    return [(plan.spans[0].start, plan.spans[0].end, plan.spans[0].store_end) for plan in harness.plans]


def window(req: FakeReq) -> list[tuple[int, str, int]]:
    return [(block.start, block.status.name, block.num_masks) for block in req.window]


def test_a_block_knows_its_progress() -> None:
    block = DiffusionBlock(index=2, start=8, size=4, num_masks=3)
    assert (block.end, block.progress, block.is_complete) == (12, 0.25, False)
    block.num_masks = 0
    assert (block.progress, block.is_complete) == (1.0, True)


def test_a_prompt_with_a_tail_begins_in_its_last_block(stub: str) -> None:
    req = table_harness(stub, SLOW).add([7] * 6, max_tokens=9)
    assert (req.head_end, req.window_start, req.window_end, len(req.tokens)) == (4, 4, 8, 16)
    assert window(req) == [(4, "ACTIVE", 2)]
    assert req.filled.tolist() == [True] * 6 + [False] * 10
    assert req.tokens.tolist() == [7] * 6 + [MASK_ID] * 10


def test_a_prompt_of_whole_blocks_begins_behind_it(stub: str) -> None:
    req = table_harness(stub, SLOW).add([7] * 8, max_tokens=4)
    assert (req.head_end, req.window_start, len(req.tokens)) == (8, 8, 12)
    assert window(req) == [(8, "ACTIVE", 4)]


def test_the_first_block_waits_for_the_prompt_when_activation_in_prefill_is_off(stub: str) -> None:
    harness = table_harness(stub, FAST, activate_in_prefill=False)
    req = harness.add([7] * 8, max_tokens=4)
    harness.run()
    assert spans(harness) == [(0, 8, 8), (8, 12, 8)]
    assert (req.nfe.prefill, req.nfe.denoise) == (1, 1)
    # A prompt that is stored already needs no forward of its own.
    again = harness.add([7] * 8, max_tokens=4)
    harness.run()
    assert (again.nfe.prefill, again.nfe.denoise, again.num_cached_tokens) == (0, 1, 8)


def test_blocks_are_never_more_than_the_answer_needs(stub: str) -> None:
    harness = table_harness(stub, FAST, buffer_size=4, add_block_threshold=0.0)
    req = harness.add([7] * 6, max_tokens=7)
    harness.run()
    assert max(end for _, end, _ in spans(harness)) == 16
    assert req.output_ids() == [5] * 7
    assert req.num_decoded == 10


@pytest.mark.parametrize(
    ("threshold", "opened_after"), [(0.0, 0), (0.1, 1), (0.25, 1), (0.26, 2), (0.5, 2), (1.0, 4)]
)
def test_the_next_block_opens_from_the_add_threshold_on(
    stub: str, threshold: float, opened_after: int
) -> None:
    harness = table_harness(stub, SLOW, buffer_size=2, add_block_threshold=threshold)
    req = harness.add([7] * 4, max_tokens=16)
    for _ in range(opened_after):
        # A block is opened after the step that reached the threshold.
        assert len(req.window) == 1
        harness.step()
    if opened_after == 0:
        harness.step()
    assert [start for start, _, _ in window(req)] == [4, 8]


def test_at_most_one_block_opens_in_a_step(stub: str) -> None:
    harness = table_harness(stub, FAST, buffer_size=4, add_block_threshold=0.0)
    req = harness.add([7] * 4, max_tokens=40)
    sizes = [len(req.window)]
    for _ in range(3):
        harness.step()
        sizes.append(len(req.window))
    assert all(after - before <= 1 for before, after in pairwise(sizes))


def test_the_buffer_is_never_wider_than_its_size(stub: str) -> None:
    harness = table_harness(stub, SLOW, buffer_size=3, add_block_threshold=0.0)
    req = harness.add([7] * 4, max_tokens=60)
    widths = []
    for _ in range(12):
        harness.step()
        widths.append(len(req.window))
    assert max(widths) == 3


def test_a_single_block_stores_and_denoises_the_next_in_one_forward(stub: str) -> None:
    harness = table_harness(stub, FAST)
    req = harness.add([7] * 4, max_tokens=12)
    harness.run()
    assert spans(harness) == [(0, 8, 4), (4, 12, 8), (8, 16, 12)]
    assert (req.nfe.denoise, req.nfe.store) == (3, 0)


def test_without_overlap_a_forward_of_its_own_stores_the_block(stub: str) -> None:
    harness = table_harness(stub, FAST, overlap_store=False)
    req = harness.add([7] * 4, max_tokens=12)
    harness.run()
    assert spans(harness) == [(0, 8, 4), (4, 8, 8), (8, 12, 8), (8, 12, 12), (12, 16, 12)]
    assert (req.nfe.denoise, req.nfe.store) == (3, 2)


def test_the_overlapping_slot_of_a_single_block_opens_only_when_the_block_is_complete(stub: str) -> None:
    harness = table_harness(stub, SLOW, add_block_threshold=0.0)
    req = harness.add([7] * 4, max_tokens=12)
    for _ in range(3):
        harness.step()
        assert len(req.window) == 1
    harness.step()
    assert window(req) == [(4, "TO_CACHE", 0), (8, "ACTIVE", 4)]


def test_a_block_that_is_done_before_its_left_neighbour_waits_for_it(stub: str) -> None:
    predictions = answer(4, [5] * 4, 0.3) | answer(8, [6] * 4)
    harness = table_harness(stub, table(predictions), buffer_size=2, add_block_threshold=0.25)
    req = harness.add([7] * 4, max_tokens=16)
    harness.step()
    harness.step()
    assert window(req) == [(4, "ACTIVE", 2), (8, "ACTIVE", 0)]
    harness.step()
    harness.step()
    assert [block.status for block in req.window] == [BlockStatus.TO_CACHE, BlockStatus.TO_CACHE]
    assert (req.window_start, req.final_end) == (4, 12)
    harness.step()
    assert req.window_start == 12
    assert spans(harness)[-1][2] == 12


def test_stability_above_zero_waits_for_a_complete_block(stub: str) -> None:
    settings = {"buffer_size": 2, "add_block_threshold": 0.0}
    eager = table_harness(stub, SLOW, **settings).add([7] * 4, max_tokens=16)
    assert len(eager.window) == 1
    harness = table_harness(stub, SLOW, token_stability_threshold=0.5, **settings)
    req = harness.add([7] * 4, max_tokens=16)
    for _ in range(3):
        harness.step()
        assert len(req.window) == 1
    harness.step()
    assert len(req.window) == 2


@pytest.mark.parametrize(("always", "second_fills"), [(False, 0), (True, 1)])
def test_families_that_always_force_fill_every_open_block(stub: str, always: bool, second_fills: int) -> None:
    Twist.always_force = always
    harness = table_harness(stub, SLOW, buffer_size=2, add_block_threshold=0.0)
    req = harness.add([7] * 4, max_tokens=16)
    harness.step()
    harness.step()
    assert window(req) == [(4, "ACTIVE", 2), (8, "ACTIVE", 4 - second_fills)]


def test_prompt_tokens_count_as_progress(stub: str) -> None:
    harness = table_harness(stub, SLOW, buffer_size=2, semi_complete_threshold=0.75)
    req = harness.add([7] * 7, max_tokens=9)
    assert len(req.window) == 2
    harness.step()
    # The tail of three prompt tokens lets the next block fill its best position at once.
    assert harness.accepted[0] == [[(7, 5), (8, 5)]]


def test_dummies_are_forwarded_only_when_they_are_asked_for(stub: str) -> None:
    harness = table_harness(stub, SLOW, buffer_size=3, skip_dummy_blocks=False, add_block_threshold=1.0)
    req = harness.add([7] * 4, max_tokens=20)
    harness.step()
    assert (harness.plans[0].spans[0].end, len(req.window)) == (16, 1)
    assert harness.runner.prepare(harness.plans[0].spans).sample_positions.tolist() == [5, 6, 7]
    last = harness.add([8] * 4, max_tokens=4)
    harness.run()
    assert max(s.end for plan in harness.plans for s in plan.spans if s.req is last) == 8
    assert req.output_ids() == [5] * 20


def test_the_mask_id_in_a_prompt_is_an_ordinary_token(stub: str) -> None:
    harness = table_harness(stub, FAST, buffer_size=2)
    prompt = [MASK_ID, 7, MASK_ID, 7, 7, MASK_ID]
    req = harness.add(prompt, max_tokens=6)
    harness.run()
    assert req.tokens[:6].tolist() == prompt
    assert req.output_ids() == [5] * 6
    assert all(position >= 6 for step in harness.accepted[0] for position, _ in step)


def test_every_forward_counts_by_its_kind(stub: str) -> None:
    harness = table_harness(stub, FAST, activate_in_prefill=False, overlap_store=False)
    req = harness.add([7] * 8, max_tokens=8)
    harness.run()
    kinds = [plan.spans[0].kind for plan in harness.plans]
    assert kinds == [ForwardKind.PREFILL, ForwardKind.DENOISE, ForwardKind.STORE, ForwardKind.DENOISE]
    assert req.nfe.as_dict() == {"prefill": 1, "denoise": 2, "store": 1, "rebuild": 0, "total": 4}
    assert req.num_forward_tokens == 8 + 4 + 4 + 4


def test_a_rebuild_without_open_positions_counts_as_rebuild(stub: str) -> None:
    harness = table_harness(stub, SLOW, enable_prefix_caching=False, max_model_len=64)
    req = harness.add([7] * 17, max_tokens=20)
    for _ in range(6):
        harness.step()
    harness.scheduler.preempt(req)
    assert (req.stored_end, req.num_preemptions, req.pages) == (0, 1, [])
    harness.scheduler.max_num_batched_tokens = 16
    harness.run()
    assert req.nfe.rebuild == 1
    assert req.output_ids() == [5] * 20
    undisturbed = table_harness(stub, SLOW).add([7] * 17, max_tokens=20)
    assert req.num_blocks == undisturbed.num_blocks


def test_a_withdrawn_admission_leaves_no_trace(stub: str) -> None:
    req = table_harness(stub, SLOW).add([7] * 9, max_tokens=4)
    before = (window(req), req.status, req.stored_end, req.nfe.total)
    req.admit(8)
    assert req.stored_end == 8
    req.withdraw()
    assert (window(req), req.status, req.stored_end, req.nfe.total) == before


def test_the_first_reason_to_end_stays(stub: str) -> None:
    req = table_harness(stub, SLOW).add([7] * 9, max_tokens=4)
    req.finish("aborted")
    at = req.finish_time
    req.finish("error", "late")
    assert (req.completion_reason, req.error, req.finish_time) == ("aborted", None, at)


@pytest.mark.parametrize("length", [128, 129, 138])
def test_b19_a_prompt_as_long_as_the_model_allows_is_refused_with_both_numbers(
    stub: str, length: int
) -> None:
    harness = table_harness(stub, SLOW, max_model_len=128)
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens, max_model_len is 128"):
        harness.add([7] * length)
    assert harness.add([7] * 127, max_tokens=5).limit == 128


def test_an_empty_prompt_is_refused(stub: str) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        table_harness(stub, SLOW).add([])


def test_a_request_without_configuration_has_the_default_rules() -> None:
    req = MultiBlockReqTemplate([7] * 3)
    assert req.rules == DecodeRules()
    assert req.sampling_params == SamplingParams()
    assert (req.rules.block_size, req.rules.window_slots, req.rules.add_block_threshold) == (32, 4, 0.1)


def test_rules_come_from_the_configuration(stub: str) -> None:
    config = table_harness(
        stub, SLOW, buffer_size=1, seed=9, auto_max_nfe=True, auto_max_nfe_warmup_steps=5
    ).config
    rules = DecodeRules.from_config(config)
    assert (rules.block_size, rules.max_model_len, rules.mask_token_id) == (4, 128, MASK_ID)
    assert rules.eos_token_ids == EOS_IDS
    assert (rules.seed, rules.auto_max_nfe, rules.auto_max_nfe_warmup_steps) == (9, True, 5)
    assert (rules.window_slots, rules.add_block_threshold) == (2, 1.0)


def uniforms(harness: Harness, prompt: list[int], **params: Any) -> list[float]:
    req = harness.add(prompt, temperature=1.0, max_tokens=8, **params)
    result: list[float] = req.uniforms(np.arange(req.num_prompt, req.window_end)).tolist()
    return result


def test_draws_come_from_the_seed_of_the_request_alone(stub: str) -> None:
    harness = table_harness(stub, SLOW, seed=1)
    other = table_harness(stub, SLOW, seed=2)
    wanted = uniforms(harness, [7] * 4, seed=3)
    assert len(set(wanted)) == 4
    assert all(0 <= number < 1 for number in wanted)
    assert uniforms(other, [8] * 4, seed=3) == wanted
    assert uniforms(harness, [7] * 4, seed=4) != wanted


def test_without_a_seed_draws_come_from_the_engine_seed_and_the_request_id(stub: str) -> None:
    first, again, other = (table_harness(stub, SLOW, seed=seed) for seed in (1, 1, 2))
    wanted = uniforms(first, [7] * 4)
    assert uniforms(again, [7] * 4) == wanted
    assert uniforms(again, [7] * 4) != wanted
    assert uniforms(other, [7] * 4) != wanted


def test_draws_change_from_step_to_step_and_belong_to_positions(stub: str) -> None:
    harness = table_harness(stub, SLOW)
    req = harness.add([7] * 4, temperature=1.0, max_tokens=8, seed=5)
    before = req.uniforms(np.array([4, 5, 6, 7]))
    assert req.uniforms(np.array([5, 7])).tolist() == before[[1, 3]].tolist()
    harness.step()
    after = req.uniforms(np.array([4, 5, 6, 7]))
    assert not set(before.tolist()) & set(after.tolist())
