"""What users get of a request, and the totals over a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.engine.outputs import build_output, invalid_output
from diffulex.utils.output import (
    FINISH_REASON_OF,
    BlockTrace,
    GenerationOutput,
    NfeCounts,
    RequestOutput,
    StepRecord,
    aggregate,
)
from tests.support.tables import MASK_ID, answer, table, table_harness

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW = table({}, rest=(5, 0.3))
EOS = 1


class Letters:
    """Token i is letter number i; special tokens are shown as brackets unless they are skipped."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in token_ids if i > 2 or not skip_special_tokens]
        return "".join(chr(ord("a") + i) if i > 2 else f"<{i}>" for i in shown)


def make_output(**changes: Any) -> RequestOutput:
    plain: dict[str, Any] = {
        "req_id": 0, "token_ids": [5] * 4, "full_token_ids": [5] * 4, "text": "ffff", "full_text": "ffff",
        "completion_reason": "max_new_tokens_reached", "num_prompt_tokens": 3, "num_cached_tokens": 0,
        "num_decoded_tokens": 6, "num_unfilled": 0, "num_preemptions": 0, "num_forward_tokens": 20,
        "nfe": NfeCounts(prefill=1, denoise=2, store=1), "arrival_time": 10.0, "first_token_time": 11.0,
        "finish_time": 14.0,
    }  # fmt: skip
    return RequestOutput(**{**plain, **changes})


def test_an_output_holds_the_answer_and_what_it_cost(stub: str) -> None:
    harness = table_harness(stub, table(answer(4, [5, 6, 8, 9, 5, EOS, 8, 9])))
    req = harness.add([7] * 4, max_tokens=16)
    harness.run()
    output = build_output(req, Letters())
    assert (output.token_ids, output.text) == ([5, 6, 8, 9, 5], "fgijf")
    assert output.full_token_ids == [5, 6, 8, 9, 5, EOS, 8, 9]
    assert output.full_text == "fgijf<1>ij"
    assert (output.finish_reason, output.completion_reason) == ("stop", "eos_token_generated")
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (4, 0)
    assert (output.num_output_tokens, output.num_decoded_tokens, output.num_unfilled) == (5, 8, 0)
    assert output.nfe.total == len(harness.plans) == 2
    assert output.num_forward_tokens == sum(plan.num_rows for plan in harness.plans)
    assert (output.tpf, output.tpf_decode) == (5 / 2, 8 / 2)
    assert output.arrival_time <= output.finish_time


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_an_aborted_request_returns_no_mask_id_and_counts_what_is_open(stub: str, steps: int) -> None:
    predictions = answer(4, [5, 5, 6, 6], 0.3) | {6: (6, 0.99)}
    harness = table_harness(stub, table(predictions, rest=(5, 0.3)))
    req = harness.add([7] * 4, max_tokens=7)
    for _ in range(steps):
        harness.step()
    harness.scheduler.abort(req.req_id)
    output = build_output(req, Letters())
    open_now = {0: 4, 1: 3, 2: 2, 3: 1, 6: 1}[steps]
    assert (output.finish_reason, output.num_unfilled) == ("abort", open_now)
    filled = {0: [], 1: [], 2: [5], 3: [5, 5, 6], 6: [5, 5, 6, 6, 5, 5]}[steps]
    assert output.token_ids == filled
    assert MASK_ID not in output.full_token_ids
    assert output.nfe.total == steps


def test_open_positions_behind_a_regular_end_are_not_reported_as_lost(stub: str) -> None:
    predictions = answer(4, [5, EOS], 0.95) | answer(6, [8, 8], 0.3)
    harness = table_harness(stub, table(predictions))
    req = harness.add([7] * 4, max_tokens=8)
    harness.run()
    output = build_output(req, Letters())
    assert req.num_unfilled == 2
    assert (output.num_unfilled, output.token_ids) == (0, [5])


def test_a_request_that_runs_has_no_output(stub: str) -> None:
    req = table_harness(stub, SLOW).add([7], max_tokens=4)
    with pytest.raises(ValueError, match="request 0 has not finished"):
        build_output(req, Letters())


def test_an_invalid_prompt_has_an_output_with_its_message() -> None:
    output = invalid_output(3, "the prompt is empty")
    assert (output.req_id, output.finish_reason, output.error) == (3, "error", "the prompt is empty")
    assert (output.token_ids, output.text, output.nfe.total, output.tpf, output.tpf_decode) == (
        [],
        "",
        0,
        0,
        0,
    )
    assert output.finish_time == output.arrival_time


def test_every_reason_has_its_coarse_form_and_its_flag() -> None:
    flags = [
        "eos_token_generated", "max_new_tokens_reached", "max_model_len_reached", "max_nfe_reached",
        "max_repetition_run_reached",
    ]  # fmt: skip
    coarse = {"stop": 3, "length": 5, "abort": 1, "error": 1}
    for reason, finish in FINISH_REASON_OF.items():
        output = make_output(completion_reason=reason)
        assert output.finish_reason == finish
        assert [name for name in flags if getattr(output, name)] == [reason] * (reason in flags)
        assert output.is_truncated == (finish == "length")
    assert {name: list(FINISH_REASON_OF.values()).count(name) for name in coarse} == coarse


def test_tokens_per_forward_are_taken_over_all_or_over_decoding_forwards() -> None:
    output = make_output(nfe=NfeCounts(prefill=3, denoise=2, store=1, rebuild=2))
    assert (output.tpf, output.tpf_decode) == (4 / 8, 6 / 3)
    assert output.nfe.as_dict() == {"prefill": 3, "denoise": 2, "store": 1, "rebuild": 2, "total": 8}


def test_step_records_say_what_they_hold() -> None:
    record = StepRecord(4, "prefill", 0.5, 0, 8, ((8, 5, 0.9), (9, 6, 0.8)), 8, (5, 6), ())
    assert (record.is_prefill, record.num_generated_tokens) == (True, 2)
    active, dummy = BlockTrace(0, "ACTIVE", 3, 0.25), BlockTrace(1, "DUMMY", 4, 0.0)
    assert (active.is_active, active.is_dummy, dummy.is_active, dummy.is_dummy) == (True, False, False, True)


def test_totals_are_sums_and_rates_use_the_wall_time_of_the_run() -> None:
    outputs = [
        make_output(),
        make_output(
            token_ids=[5] * 6, nfe=NfeCounts(denoise=6, rebuild=2), num_decoded_tokens=9, arrival_time=12.0,
            first_token_time=14.0, finish_time=20.0, completion_reason="eos_token_generated",
        ),
        make_output(
            token_ids=[], nfe=NfeCounts(), num_decoded_tokens=0, arrival_time=11.0, first_token_time=None,
            finish_time=11.0, completion_reason="error",
        ),
    ]  # fmt: skip
    totals = GenerationOutput(outputs, 99.0).stats()
    assert totals == aggregate(outputs)
    assert (totals["num_requests"], totals["tokens_output"], totals["tokens_decoded"]) == (3, 10, 15)
    assert totals["nfe"] == {"prefill": 1, "denoise": 8, "store": 1, "rebuild": 2, "total": 12}
    assert totals["tpf"] == pytest.approx((4 / 4 + 6 / 8 + 0) / 3)
    assert totals["aggregate_tpf"] == pytest.approx(10 / 12)
    assert totals["tpf_decode"] == pytest.approx((6 / 3 + 9 / 6 + 0) / 3)
    assert (totals["wall_time"], totals["tps"]) == (10.0, 1.0)
    assert totals["tps"] * totals["wall_time"] == totals["tokens_output"]
    assert totals["ttft"] == pytest.approx((1 + 2) / 2)
    assert totals["tpot"] == pytest.approx((3 / 3 + 6 / 5) / 2)
    assert totals["completion_reasons"] == {
        "max_new_tokens_reached": 1, "eos_token_generated": 1, "error": 1
    }  # fmt: skip
    assert sum(totals["completion_reasons"].values()) == totals["num_requests"]


def test_totals_over_nothing_are_zero() -> None:
    totals = GenerationOutput([], 0.0).stats()
    assert (totals["num_requests"], totals["tokens_output"], totals["tpf"], totals["tps"]) == (0, 0, 0.0, 0.0)
    assert (len(GenerationOutput([], 0.0)), totals["ttft"], totals["completion_reasons"]) == (0, 0.0, {})
