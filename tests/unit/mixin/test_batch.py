"""Requests become the arrays of one ragged forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from diffulex.mixin.multi_block.batch import BlockBatch, build_batch
from diffulex.sampling_params import FORCE_SCORES
from tests.support.engines import Harness, Twist
from tests.support.tables import MASK_ID, answer, table, table_harness

if TYPE_CHECKING:
    from collections.abc import Sequence

TAIL = [11, 12, 13, 14, 15, 16]  # one whole block of four and half of the next
WHOLE = [7, 8, 9, 10]


def harness_of(stub: str, **settings: Any) -> Harness:
    return table_harness(stub, table({}), **{"page_size": 8, "buffer_size": 2, **settings})


def batch_of(harness: Harness, *, shift: bool = False) -> BlockBatch:
    plan = harness.scheduler.schedule()
    return build_batch(plan.spans, harness.config.page_size, shift_logits=shift)


def test_a_prompt_with_a_tail_forwards_its_head_and_two_open_blocks(stub: str) -> None:
    harness = harness_of(stub)
    req = harness.add(TAIL, max_tokens=20)
    batch = batch_of(harness)
    assert batch.input_ids.tolist() == TAIL + [MASK_ID] * 6
    assert batch.positions.tolist() == list(range(12))
    assert batch.visible_ends.tolist() == [4] * 4 + [8] * 4 + [12] * 4
    first = req.pages[0] * 8
    assert batch.slot_mapping.tolist() == [first, first + 1, first + 2, first + 3] + [-1] * 8
    assert batch.cu_q_lens.tolist() == [0, 12]
    assert batch.context_lens.tolist() == [0]
    assert batch.page_tables.tolist() == [req.pages]
    assert batch.row_offsets.tolist() == [0, 6]
    assert batch.sample_positions.tolist() == [6, 7, 8, 9, 10, 11]
    assert batch.logits_rows.tolist() == [6, 7, 8, 9, 10, 11]
    assert batch.groups.tolist() == [0, 0, 1, 1, 1, 1]
    # The second block may not be forced: its left neighbour is only half filled.
    assert batch.can_force.tolist() == [True, False]
    assert batch.save_rows.tolist() == []
    assert batch.draws is None


def test_requests_of_other_lengths_stand_one_behind_the_other(stub: str) -> None:
    harness = harness_of(stub)
    first, second = harness.add(TAIL, max_tokens=20), harness.add(WHOLE * 5, max_tokens=20)
    batch = batch_of(harness)
    assert batch.cu_q_lens.tolist() == [0, 12, 36]
    assert batch.input_ids.tolist() == TAIL + [MASK_ID] * 6 + WHOLE * 5 + [MASK_ID] * 4
    assert batch.positions.tolist() == [*range(12), *range(24)]
    assert batch.page_tables.tolist() == [[first.pages[0], -1, -1], second.pages]
    assert batch.row_offsets.tolist() == [0, 6, 10]
    assert batch.sample_positions.tolist() == [6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert batch.logits_rows.tolist() == [6, 7, 8, 9, 10, 11, 32, 33, 34, 35]
    assert batch.groups.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert batch.can_force.tolist() == [True, False, True]
    pages = np.repeat(second.pages, 8)[:20] * 8 + np.tile(np.arange(8), 3)[:20]
    assert batch.slot_mapping[12:].tolist() == [*pages.tolist(), -1, -1, -1, -1]


def test_a_later_forward_starts_where_the_stored_part_ends(stub: str) -> None:
    harness = harness_of(stub)
    req = harness.add(TAIL, max_tokens=20)
    harness.step()
    batch = batch_of(harness)
    # Both blocks were filled at once: the forward stores them and opens one more.
    assert batch.context_lens.tolist() == [4]
    assert batch.positions.tolist() == list(range(4, 12))
    assert batch.visible_ends.tolist() == [8] * 4 + [12] * 4
    slots = [req.pages[place // 8] * 8 + place % 8 for place in range(4, 12)]
    assert batch.slot_mapping.tolist() == slots
    assert batch.sample_positions.tolist() == []


def test_with_shifted_logits_the_row_before_predicts_and_the_stored_end_is_kept(stub: str) -> None:
    harness = harness_of(stub)
    harness.add([9], max_tokens=20)
    req = harness.add(TAIL, max_tokens=20)
    batch = batch_of(harness, shift=True)
    # The first request stores nothing, its one prompt token stands before the first open position.
    own = batch.row_offsets[1]
    assert batch.sample_positions[:own].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.logits_rows[:own].tolist() == [0, 1, 2, 3, 4, 5, 6]
    start = batch.cu_q_lens[1]
    assert batch.logits_rows[own:].tolist() == [start + place - 1 for place in range(6, 12)]
    assert batch.save_rows.tolist() == [start + 3]
    assert batch.save_slots.tolist() == [req.slot]


def test_the_first_open_position_of_a_forward_reads_the_boundary_row_of_its_slot(stub: str) -> None:
    Twist.shift = True
    slow = table(dict.fromkeys(range(60), (5, 0.3)) | {4: (6, 0.4)})
    harness = table_harness(stub, slow, page_size=8)
    for _ in range(2):
        harness.add(WHOLE, max_tokens=20)
    second = harness.requests[1]
    harness.step()
    batch = batch_of(harness, shift=True)
    assert batch.context_lens.tolist() == [4, 4]
    # Row 4 predicts position 5, which was filled; position 4 has no row before it in this forward.
    assert batch.sample_positions.tolist() == [4, 6, 7] * 2
    assert batch.logits_rows.tolist() == [-1, 1, 2, -1 - second.slot, 5, 6]
    assert (harness.requests[0].slot, second.slot) == (0, 1)
    assert batch.save_rows.tolist() == []


def test_a_piece_of_a_prompt_samples_nothing(stub: str) -> None:
    harness = harness_of(stub, max_num_batched_tokens=128, max_model_len=128)
    req = harness.add(WHOLE * 10, max_tokens=20)
    harness.scheduler.max_num_batched_tokens = 16
    batch = batch_of(harness)
    assert batch.positions.tolist() == list(range(16))
    assert batch.sample_positions.tolist() == []
    assert batch.can_force.tolist() == []
    assert (batch.slot_mapping >= 0).all()
    assert req.pages == [0, 1]


def test_sampling_parameters_stand_beside_each_row_of_their_request(stub: str) -> None:
    harness = harness_of(stub)
    harness.add(WHOLE, max_tokens=20)
    hot = harness.add(TAIL, max_tokens=20, temperature=0.5, top_p=0.75, top_k=3, confidence="margin")
    draws = batch_of(harness).draws
    assert draws is not None
    assert draws.temperature_N.tolist() == [0] * 4 + [0.5] * 6
    assert draws.top_p_N.tolist() == [1] * 4 + [0.75] * 6
    assert draws.top_k_N.tolist() == [0] * 4 + [3] * 6
    assert draws.force_score_N.tolist() == [0] * 4 + [FORCE_SCORES.index("margin")] * 6
    assert draws.uniform_N[:4].tolist() == [0] * 4
    assert draws.uniform_N[4:].tolist() == hot.uniforms(np.arange(6, 12)).tolist()


def test_a_greedy_request_that_forces_unusually_needs_parameters_too(stub: str) -> None:
    harness = harness_of(stub)
    harness.add(WHOLE, max_tokens=20, confidence="neg_entropy")
    draws = batch_of(harness).draws
    assert draws is not None
    assert draws.temperature_N.tolist() == [0] * 4
    assert draws.force_score_N.tolist() == [FORCE_SCORES.index("neg_entropy")] * 4


@pytest.mark.parametrize(("progress", "may_force"), [([5, 6, 7], True), ([5, 6], False)])
def test_a_block_may_be_forced_from_the_semi_complete_threshold_on(
    stub: str, progress: Sequence[int], may_force: bool
) -> None:
    predictions = answer(0, [5] * 30, 0.3) | dict.fromkeys(progress, (6, 0.95))
    harness = table_harness(
        stub, table(predictions), page_size=8, buffer_size=2, semi_complete_threshold=0.75
    )
    harness.add(WHOLE, max_tokens=20)
    harness.step()
    batch = batch_of(harness)
    assert batch.can_force.tolist() == [True, may_force]
