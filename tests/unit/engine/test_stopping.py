"""When a request ends, why, and what its answer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import Twist
from tests.support.tables import MASK_ID, answer, table, table_harness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.engines import FakeReq, Harness

SLOW = table({}, rest=(5, 0.3))
PROMPT = [7] * 4  # answers begin at position 4, the beginning of a block
EOS, OTHER_EOS = 1, 2


class Letters:
    """Token i is the letter number i; as a stream and as a codec."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + number) for number in ids)

    def push(self, ids: Sequence[int]) -> str:
        return self.decode(ids)


def ended(stub: str, tokens: Sequence[int], *, prob: float = 0.95, **params: Any) -> FakeReq:
    """The request after it answered `tokens`, single block of four, and then fives."""
    req, _ = played(stub, table(answer(4, tokens, prob)), **params)
    return req


def played(
    stub: str, logits: Any, settings: dict[str, Any] | None = None, **params: Any
) -> tuple[FakeReq, Harness]:
    harness = table_harness(stub, logits, **(settings or {}))
    req = harness.add(PROMPT, **{"max_tokens": 16, **params})
    if params.get("stop"):
        req.stop_rules.attach_text(Letters(), Letters())
    harness.run()
    assert harness.pool.num_free == harness.pool.num_pages
    assert MASK_ID not in req.output_ids()
    return req, harness


# Stop ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_each_eos_id_ends_the_answer_before_itself(stub: str, eos: int) -> None:
    req = ended(stub, [5, 6, 8, 9, 5, eos, 6, 8])
    assert (req.output_ids(), req.completion_reason) == ([5, 6, 8, 9, 5], "eos_token_generated")
    assert req.full_output_ids() == [5, 6, 8, 9, 5, eos, 6, 8]


def test_the_first_of_several_stops_counts(stub: str) -> None:
    req = ended(stub, [5, OTHER_EOS, 6, EOS])
    assert req.output_ids() == [5]


def test_user_stop_ids_end_the_answer_with_their_own_reason(stub: str) -> None:
    req = ended(stub, [5, 9, 6, EOS], stop_token_ids=[9, 20])
    assert (req.output_ids(), req.completion_reason) == ([5], "stop_token")
    req = ended(stub, [5, EOS, 6, 9], stop_token_ids=[9])
    assert (req.output_ids(), req.completion_reason) == ([5], "eos_token_generated")


def test_ignored_eos_is_an_ordinary_token_and_user_stop_ids_still_count(stub: str) -> None:
    req = ended(stub, [5, EOS, 6, 9], ignore_eos=True, stop_token_ids=[9])
    assert (req.output_ids(), req.completion_reason) == ([5, EOS, 6], "stop_token")
    req = ended(stub, [5, EOS, 6, 9], ignore_eos=True, max_tokens=6)
    assert (req.output_ids(), req.completion_reason) == ([5, EOS, 6, 9, 5, 5], "max_new_tokens_reached")


def test_an_ignored_eos_that_is_a_user_stop_id_stops(stub: str) -> None:
    req = ended(stub, [5, EOS, 6, 9], ignore_eos=True, stop_token_ids=[EOS])
    assert (req.output_ids(), req.completion_reason) == ([5], "stop_token")


def test_a_stop_behind_open_positions_waits_for_them(stub: str) -> None:
    predictions = answer(4, [5, 6, 8], 0.3) | {7: (EOS, 0.99)}
    req, harness = played(stub, table(predictions))
    assert [len(step) for step in harness.accepted[0]] == [1, 1, 1, 1]
    assert harness.accepted[0][0] == [(7, EOS)]
    assert (req.output_ids(), req.completion_reason) == ([5, 6, 8], "eos_token_generated")


def test_an_earlier_stop_that_comes_later_takes_over(stub: str) -> None:
    predictions = answer(4, [5, EOS, 8], 0.3) | {7: (EOS, 0.99)}
    req, _ = played(stub, table(predictions))
    assert req.output_ids() == [5]


def test_a_later_stop_that_comes_later_changes_nothing(stub: str) -> None:
    predictions = answer(4, [5, EOS, EOS, 8], 0.3) | {5: (EOS, 0.99), 6: (EOS, 0.5)}
    req, harness = played(stub, table(predictions))
    assert [position for step in harness.accepted[0] for position, _ in step][:3] == [5, 6, 4]
    assert req.output_ids() == [5]


def test_open_blocks_behind_a_stop_are_given_up_at_once(stub: str) -> None:
    # The block opens its right neighbour before its third forward finds the stop.
    predictions = {4: (5, 0.3), 5: (EOS, 0.35), 6: (5, 0.5), 7: (5, 0.5)} | answer(8, [6] * 4, 0.3)
    settings = {"buffer_size": 2, "add_block_threshold": 0.0}
    req, harness = played(stub, table(predictions), settings)
    assert [plan.spans[0].end for plan in harness.plans] == [8, 12, 12, 8]
    assert req.output_ids() == [5]


def test_a_stop_before_the_limit_is_the_reason_even_when_its_block_stays_open(stub: str) -> None:
    predictions = answer(4, [5, EOS]) | answer(6, [8, 8], 0.3)
    req, _ = played(stub, table(predictions), {"early_eos_stop": False}, max_tokens=2)
    assert (req.output_ids(), req.completion_reason) == ([5], "eos_token_generated")


def test_a_stop_closes_the_blocks_behind_it_and_opens_no_more(stub: str) -> None:
    predictions = answer(4, [5, 6, 8], 0.3) | {7: (EOS, 0.99)} | answer(8, [5] * 8, 0.3)
    settings = {"buffer_size": 4, "add_block_threshold": 0.0}
    req, harness = played(stub, table(predictions), settings)
    ends = [plan.spans[0].end for plan in harness.plans]
    # Only the first block is open when its stop is found: nothing behind it ever runs.
    assert ends == [8] * 4
    assert req.num_decoded == 4


@pytest.mark.parametrize("early", [True, False])
def test_early_eos_stop_saves_forwards_and_changes_no_token(stub: str, early: bool) -> None:
    predictions = answer(4, [5, 6, 8, 9], 0.3) | answer(8, [5, EOS, 6, 8], 0.3) | answer(12, [9] * 4, 0.2)
    predictions[9] = (EOS, 0.99)
    settings = {"buffer_size": 3, "add_block_threshold": 0.25, "early_eos_stop": early}
    req, _ = played(stub, table(predictions), settings)
    assert (req.output_ids(), req.completion_reason) == ([5, 6, 8, 9, 5], "eos_token_generated")
    assert req.num_decoded == (6 if early else 8)


def test_eos_in_every_position_of_the_first_block_gives_an_empty_answer(stub: str) -> None:
    req = ended(stub, [EOS] * 4)
    assert (req.output_ids(), req.completion_reason) == ([], "eos_token_generated")
    assert (req.nfe.total, req.num_decoded) == (1, 4)


def test_a_stop_behind_max_tokens_is_not_seen(stub: str) -> None:
    req = ended(stub, [5, 6, EOS, 8], max_tokens=2)
    assert (req.output_ids(), req.completion_reason) == ([5, 6], "max_new_tokens_reached")
    req = ended(stub, [5, EOS, 6, 8], max_tokens=2)
    assert (req.output_ids(), req.completion_reason) == ([5], "eos_token_generated")


# Lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_max_tokens_is_exact(stub: str, max_tokens: int) -> None:
    for logits in (SLOW, table({})):
        req, _ = played(stub, logits, max_tokens=max_tokens)
        assert (req.output_ids(), req.completion_reason) == ([5] * max_tokens, "max_new_tokens_reached")


@pytest.mark.parametrize("max_model_len", [5, 6, 8, 9, 14])
def test_max_model_len_is_exact(stub: str, max_model_len: int) -> None:
    settings = {"max_model_len": max_model_len, "max_num_batched_tokens": 64}
    req, _ = played(stub, SLOW, settings, max_tokens=100)
    assert (len(req.output_ids()), req.completion_reason) == (max_model_len - 4, "max_model_len_reached")


def test_when_both_lengths_are_reached_max_tokens_is_the_reason(stub: str) -> None:
    settings = {"max_model_len": 12, "max_num_batched_tokens": 64}
    assert played(stub, SLOW, settings, max_tokens=8)[0].completion_reason == "max_new_tokens_reached"
    assert played(stub, SLOW, settings, max_tokens=9)[0].completion_reason == "max_model_len_reached"


def test_an_answer_ends_only_when_nothing_before_its_end_is_open(stub: str) -> None:
    predictions = answer(4, [5, 6], 0.3) | answer(6, [8, 9], 0.99)
    req, harness = played(stub, table(predictions), max_tokens=3)
    assert [position for step in harness.accepted[0] for position, _ in step] == [6, 7, 4, 5]
    assert req.output_ids() == [5, 6, 8]


# Forward limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_nfe", [1, 2, 5, 7])
def test_max_nfe_ends_after_that_many_forwards_with_what_is_filled(stub: str, max_nfe: int) -> None:
    req, _ = played(stub, SLOW, max_nfe=max_nfe)
    assert (req.nfe.total, req.completion_reason) == (max_nfe, "max_nfe_reached")
    assert req.output_ids() == [5] * max_nfe
    assert req.num_unfilled == min(4 * (-(-max_nfe // 4)), 16) - max_nfe


def test_max_nfe_drops_what_lies_behind_the_first_gap(stub: str) -> None:
    predictions = answer(4, [5, 5, 6, 6], 0.3) | {6: (6, 0.99)}
    req, _ = played(stub, table(predictions), max_nfe=2)
    assert (req.output_ids(), req.num_unfilled, req.num_decoded) == ([5], 2, 2)


def test_an_answer_that_is_done_in_the_last_forward_keeps_its_own_reason(stub: str) -> None:
    req, _ = played(stub, SLOW, max_nfe=3, max_tokens=3)
    assert req.completion_reason == "max_new_tokens_reached"
    req, _ = played(stub, table(answer(4, [5, EOS], 0.3)), max_nfe=3)
    assert req.completion_reason == "eos_token_generated"


def test_pieces_of_a_prompt_count_for_max_nfe(stub: str) -> None:
    harness = table_harness(stub, SLOW)
    harness.scheduler.max_num_batched_tokens = 8
    req = harness.add([7] * 40, max_tokens=4, max_nfe=2)
    other = harness.add([8] * 40, max_tokens=4, max_nfe=7)
    harness.run()
    assert (req.nfe.prefill, req.nfe.total, req.completion_reason) == (2, 2, "max_nfe_reached")
    assert (other.nfe.total, other.completion_reason) == (7, "max_nfe_reached")
    assert req.output_ids() == []


def test_the_final_store_respects_max_nfe(stub: str) -> None:
    settings = {"skip_final_store": False}
    req, _ = played(stub, SLOW, settings, max_nfe=4, max_tokens=4)
    assert (req.nfe.total, req.nfe.store, req.completion_reason) == (4, 0, "max_new_tokens_reached")
    req, _ = played(stub, SLOW, settings, max_nfe=5, max_tokens=4)
    assert (req.nfe.total, req.nfe.store, req.completion_reason) == (5, 1, "max_new_tokens_reached")


def test_a_final_store_that_is_preempted_and_rebuilt_respects_max_nfe(stub: str) -> None:
    harness = table_harness(stub, table({}), skip_final_store=False, enable_prefix_caching=False)
    req = harness.add([7] * 24, max_tokens=4, max_nfe=3)
    harness.step()
    assert req.is_draining
    harness.scheduler.preempt(req)
    harness.scheduler.max_num_batched_tokens = 12
    harness.run()
    assert (req.nfe.total, req.completion_reason) == (3, "max_new_tokens_reached")
    assert req.output_ids() == [5] * 4


@pytest.mark.parametrize("stop", [{"max_tokens": 6}, {"max_tokens": 16}])
def test_the_final_store_costs_one_forward_and_no_token(stub: str, stop: dict[str, int]) -> None:
    logits = table(answer(4, [5, 6, 8, 9, 5, 6, EOS, 9]))
    plain, _ = played(stub, logits, **stop)
    stored, harness = played(stub, logits, {"skip_final_store": False}, **stop)
    assert stored.output_ids() == plain.output_ids() == [5, 6, 8, 9, 5, 6]
    assert stored.completion_reason == plain.completion_reason
    assert (plain.nfe.store, stored.nfe.store, stored.nfe.denoise) == (0, 1, plain.nfe.denoise)
    last = harness.plans[-1].spans[0]
    assert (last.start, last.end, last.store_end, last.samples) == (8, 12, 12, False)


def test_the_final_store_leaves_open_blocks_out(stub: str) -> None:
    predictions = answer(4, [5, 6, 8, 9]) | answer(8, [5] * 8, 0.3)
    settings = {"skip_final_store": False, "buffer_size": 3, "add_block_threshold": 0.0}
    req, harness = played(stub, table(predictions), settings, stop_token_ids=[9])
    assert req.output_ids() == [5, 6, 8]
    assert [plan.spans[0].end for plan in harness.plans] == [8, 8]


def test_the_final_store_forwards_no_dummies(stub: str) -> None:
    settings = {"skip_final_store": False, "skip_dummy_blocks": False, "buffer_size": 3}
    _, harness = played(stub, table(answer(4, [5, 6, EOS, 9])), {**settings, "add_block_threshold": 1.0})
    assert [plan.spans[0].end for plan in harness.plans] == [16, 8]


def test_without_anything_to_store_the_final_store_is_left_out(stub: str) -> None:
    predictions = answer(4, [5, EOS, 6], 0.95) | {7: (6, 0.3)}
    req, _ = played(stub, table(predictions), {"skip_final_store": False})
    assert (req.nfe.total, req.nfe.store, req.output_ids()) == (1, 0, [5])


# Repetition ----------------------------------------------------------------------------------------------


def test_a_run_of_one_token_ends_the_answer(stub: str) -> None:
    req = ended(stub, [8, 9, 9, 9], prob=0.3, max_repetition_run=3)
    assert (req.output_ids(), req.completion_reason) == ([8, 9, 9, 9], "max_repetition_run_reached")
    req = ended(stub, [8, 9, 9, 8, 9, 9, 8, 9], prob=0.3, max_repetition_run=3, max_tokens=8)
    assert req.completion_reason == "max_new_tokens_reached"


def test_the_run_may_be_cut_down_to_one_token(stub: str) -> None:
    req = ended(stub, [8, 9, 9, 9], prob=0.3, max_repetition_run=3, trim_repetition_run=True)
    assert (req.output_ids(), req.full_output_ids()) == ([8, 9], [8, 9, 9, 9])
    req = ended(stub, [9, 9, 9, 9], prob=0.3, max_repetition_run=3, trim_repetition_run=True)
    assert req.output_ids() == [9]


def test_open_positions_are_no_run(stub: str) -> None:
    req = ended(stub, [8, 9, 8, 9], prob=0.3, max_repetition_run=3, max_tokens=4)
    assert (req.output_ids(), req.nfe.total) == ([8, 9, 8, 9], 4)


def test_a_run_behind_a_gap_does_not_count_until_the_gap_is_filled(stub: str) -> None:
    predictions = answer(4, [8], 0.3) | answer(5, [9, 9, 9])
    req, _ = played(stub, table(predictions), max_repetition_run=3)
    assert (req.nfe.total, req.output_ids()) == (2, [8, 9, 9, 9])
    assert req.completion_reason == "max_repetition_run_reached"


def test_a_run_of_one_is_the_first_token(stub: str) -> None:
    assert ended(stub, [8, 9], prob=0.3, max_repetition_run=1).output_ids() == [8]


# Stall guard ---------------------------------------------------------------------------------------------


def stalled(stub: str, logits: Any, *, floor: float, warmup: int, **params: Any) -> FakeReq:
    settings = {
        "auto_max_nfe": True, "auto_max_nfe_warmup_steps": warmup, "auto_max_nfe_tpf_floor": floor
    }  # fmt: skip
    return played(stub, logits, settings, **params)[0]


def test_an_answer_that_is_slower_than_the_floor_is_ended_after_the_warm_up(stub: str) -> None:
    req = stalled(stub, SLOW, floor=1.5, warmup=5)
    assert (req.nfe.denoise, req.completion_reason) == (5, "stalled")
    assert req.output_ids() == [5] * 5


def test_an_answer_as_fast_as_the_floor_goes_on(stub: str) -> None:
    assert stalled(stub, SLOW, floor=1.0, warmup=5).completion_reason == "max_new_tokens_reached"


def test_a_fast_start_does_not_kill_a_healthy_answer(stub: str) -> None:
    logits = table(answer(4, [5] * 8, 0.95), rest=(6, 0.3))
    req = stalled(stub, logits, floor=1.0, warmup=2)
    assert (req.completion_reason, len(req.output_ids())) == ("max_new_tokens_reached", 16)


def test_without_the_switch_a_slow_answer_goes_on(stub: str) -> None:
    assert ended(stub, [5] * 16, prob=0.3).completion_reason == "max_new_tokens_reached"


def test_forwards_that_fill_nothing_end_the_answer(stub: str) -> None:
    harness = table_harness(
        stub, SLOW, auto_max_nfe=True, auto_max_nfe_warmup_steps=3, auto_max_nfe_tpf_floor=0.1
    )
    req = harness.add(PROMPT, max_tokens=16)
    harness.step()
    nothing = harness.runner.prepare(harness.plans[0].spans).sample_positions[:0]
    reasons = []
    for _ in range(3):
        req.apply(harness.plans[0].spans[0], nothing, nothing)
        reasons.append(req.completion_reason)
    assert reasons == [None, None, "stalled"]
    harness.scheduler.abort(req.req_id)


# Stop strings --------------------------------------------------------------------------------------------


def test_a_stop_string_cuts_text_and_tokens(stub: str) -> None:
    # Letters: f g i j f g ...
    req = ended(stub, [5, 6, 8, 9, 5, 6], stop=["ij"])
    assert (req.output_ids(), req.completion_reason) == ([5, 6], "stop_string")
    assert req.stop_rules.text_end == 2


def test_b15_a_stop_string_across_two_blocks_cuts_before_its_first_token(stub: str) -> None:
    req = ended(stub, [5, 6, 8, 9, 10, 11, 12, 13], stop="jk")
    assert (req.output_ids(), req.completion_reason) == ([5, 6, 8], "stop_string")
    assert req.nfe.total == 2


def test_b15_the_earliest_match_over_the_whole_text_counts(stub: str) -> None:
    req = ended(stub, [5, 6, 8, 9], stop=["j", "gi"])
    assert req.output_ids() == [5]


def test_a_stop_string_counts_only_once_everything_before_it_is_filled(stub: str) -> None:
    predictions = answer(4, [5, 6], 0.3) | answer(6, [8, 9])
    req, _ = played(stub, table(predictions), stop=["ij"])
    assert (req.nfe.total, req.output_ids()) == (3, [5, 6])


def test_a_stop_string_wins_over_a_stop_id_and_lengths_of_the_same_forward(stub: str) -> None:
    req = ended(stub, [5, 6, EOS, 9], stop=["g"])
    assert (req.output_ids(), req.completion_reason) == ([5], "stop_string")
    req = ended(stub, [5, 6, 8, 9], stop=["i"], max_tokens=4, max_nfe=1)
    assert (req.output_ids(), req.completion_reason) == ([5, 6], "stop_string")


def test_a_stop_string_behind_a_stop_or_a_limit_is_not_seen(stub: str) -> None:
    req = ended(stub, [5, EOS, 8, 9], stop=["i"])
    assert (req.output_ids(), req.completion_reason) == ([5], "eos_token_generated")
    req = ended(stub, [5, 6, 8, 9], stop=["j"], max_tokens=3)
    assert (req.output_ids(), req.completion_reason) == ([5, 6, 8], "max_new_tokens_reached")


def test_a_stop_string_with_the_final_store_stores_what_is_finished(stub: str) -> None:
    req, _ = played(stub, table(answer(4, [5, 6, 8, 9])), {"skip_final_store": False}, stop=["i"])
    assert (req.output_ids(), req.completion_reason, req.nfe.store) == ([5, 6], "stop_string", 1)


# Priorities ----------------------------------------------------------------------------------------------


def test_max_nfe_comes_before_repetition_and_repetition_before_a_stall(stub: str) -> None:
    slow = {"auto_max_nfe": True, "auto_max_nfe_warmup_steps": 3, "auto_max_nfe_tpf_floor": 2.0}
    both = {"max_nfe": 3, "max_repetition_run": 3}
    assert played(stub, SLOW, slow, **both)[0].completion_reason == "max_nfe_reached"
    assert played(stub, SLOW, slow, max_repetition_run=3)[0].completion_reason == "max_repetition_run_reached"
    assert played(stub, SLOW, slow)[0].completion_reason == "stalled"


def test_shifted_families_stop_by_the_same_rules(stub: str) -> None:
    Twist.shift = True
    # Row p predicts position p + 1.
    req, _ = played(stub, table(answer(3, [5, 6, 8, EOS, 9])))
    assert (req.output_ids(), req.completion_reason) == ([5, 6, 8], "eos_token_generated")
