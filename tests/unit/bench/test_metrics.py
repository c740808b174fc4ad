import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffulex.utils.output import NfeCounts
from diffulex_bench.metrics import DEFINITIONS, Z_95, mean_interval, summarise_costs, wilson_interval
from tests.support.bench import make_output, make_record


@pytest.mark.parametrize(
    ("correct", "num", "low", "high"),
    # Textbook values of the Wilson score interval at 95 %.
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (79, 100, 0.7002, 0.8583),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_interval_matches_published_values(correct, num, low, high):
    interval = wilson_interval(correct, num)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_solve_the_score_equation_and_hold_the_proportion(case):
    correct, num = case
    interval = wilson_interval(correct, num)
    assert 0.0 <= interval.low <= correct / num <= interval.high <= 1.0
    for bound in (interval.low, interval.high):
        if 0.0 < bound < 1.0:
            spread = math.sqrt(bound * (1 - bound) / num)
            assert abs(correct / num - bound) == pytest.approx(Z_95 * spread, rel=1e-6, abs=1e-9)


def test_without_samples_nothing_is_known():
    assert (wilson_interval(0, 0).low, wilson_interval(0, 0).high) == (0.0, 1.0)


@pytest.mark.parametrize("correct", [-1, 11])
def test_impossible_counts_are_refused(correct):
    with pytest.raises(ValueError, match="num_correct"):
        wilson_interval(correct, 10)


def test_scores_that_are_no_verdicts_get_a_normal_interval():
    interval = mean_interval([0.0, 0.5, 1.0])
    assert interval.method == "normal95"
    assert interval.high - 0.5 == pytest.approx(Z_95 * 0.5 / math.sqrt(3))
    assert mean_interval([0.0, 1.0]).method == "wilson95"


def test_cost_formulas_on_two_samples():
    one = make_output(tokens=10, nfe=NfeCounts(1, 3, 1, 0), arrival=0.0, first=0.5, finish=2.0)
    two = make_output(
        tokens=2, nfe=NfeCounts(1, 1, 0, 2), arrival=0.0, first=1.0, finish=4.0, reason="max_nfe_reached"
    )
    costs = summarise_costs([make_record(one), make_record(two, doc_id=1, output=" ", empty=True)])
    assert costs.tokens_output == 12
    assert costs.tokens_decoded == 14
    assert costs.nfe == {"prefill": 2, "denoise": 4, "store": 1, "rebuild": 2, "total": 9}
    assert costs.tpf == pytest.approx((10 / 5 + 2 / 4) / 2)
    assert costs.tpf_decode == pytest.approx((11 / 4 + 3 / 1) / 2)
    assert costs.aggregate_tpf == pytest.approx(12 / 9)
    assert costs.wall_time == 4.0
    assert costs.tps == pytest.approx(3.0)
    assert costs.ttft == pytest.approx(0.75)
    assert costs.tpot == pytest.approx((1.5 / 9 + 3.0 / 1) / 2)
    assert costs.stop_reasons == {"eos_token_generated": 1, "max_nfe_reached": 1}
    assert (costs.num_empty, costs.num_truncated, costs.num_errors) == (1, 1, 0)


def test_no_samples_cost_nothing():
    costs = summarise_costs([])
    assert (costs.num_samples, costs.tps, costs.ttft, costs.nfe["total"]) == (0, 0.0, None, 0)


def test_failed_samples_without_passes_do_not_break_the_means():
    failed = make_output("", tokens=0, nfe=NfeCounts(), first=None, reason="error", error="boom")
    costs = summarise_costs([make_record(failed)])
    assert (costs.tpf, costs.tpf_decode, costs.num_errors, costs.ttft, costs.tpot) == (
        0.0,
        0.0,
        1,
        None,
        None,
    )


def test_every_headline_number_is_defined_in_the_report():
    for name in (
        "accuracy",
        "tpf",
        "tpf_decode",
        "aggregate_tpf",
        "tps",
        "nfe",
        "ttft",
        "tpot",
        "empty",
        "unfilled",
    ):
        assert DEFINITIONS[name]


def test_cached_and_forwarded_tokens_are_added_up():
    one = make_output(tokens=10, num_cached_tokens=4, num_forward_tokens=50)
    two = make_output(tokens=5, num_cached_tokens=1, num_forward_tokens=20)
    costs = summarise_costs([make_record(one), make_record(two, doc_id=1)])
    assert costs.tokens_cached == 5
    assert costs.tokens_forwarded == 70
    # Prompts of 5 tokens; 11 and 6 positions were decoded.
    assert costs.tokens_recomputed == (50 - 1 - 11) + (20 - 4 - 6)
    assert costs.forwarded_per_token == pytest.approx(70 / 15)
