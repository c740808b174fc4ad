import json

import pytest

from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.generation import plan_generation
from diffulex_bench.metrics import CostSummary, wilson_interval
from diffulex_bench.report import RunReport, TaskFacts, build_task_report, scores_by_document
from tests.support.bench import make_record


def facts(expected=4):
    return TaskFacts(
        expected, 1000, plan_generation(EvalSettings(), frozenset({"max_tokens"}), {"until": ["Q"]})
    )


def row(doc_id, pipeline="none", **scores):
    return {"doc_id": doc_id, "filter": pipeline, "metrics": list(scores), **scores}


def test_partial_run_is_scored_from_the_records_own_grades():
    records = [
        make_record(doc_id=0),
        make_record(doc_id=1, scores={"strict_match": 0.0, "flexible_match": 1.0}),
    ]
    report = build_task_report(facts(), records, None, [])
    assert (report.num_expected, report.num_finished, report.num_documents) == (4, 2, 1000)
    assert report.scores["strict_match"].value == 0.5
    assert report.scores["strict_match"].interval == wilson_interval(1, 2)
    assert report.accuracy == report.scores["strict_match"]
    assert report.stops == ("Q",)
    assert report.generation["max_tokens"] == {"value": 256, "origin": "eval"}


def test_finished_run_takes_lm_evals_values_with_our_interval():
    rows = [row(0, strict_match=1.0), row(1, strict_match=0.0)]
    results = {"alias": "toy", "sample_len": 2, "strict_match,none": 0.5, "strict_match_stderr,none": 0.3}
    report = build_task_report(facts(2), [make_record()], results, rows)
    assert list(report.scores) == ["strict_match"]
    assert report.scores["strict_match"].interval == wilson_interval(1, 2)
    assert report.scores["strict_match"].num_samples == 2


def test_scores_of_several_filters_stay_apart():
    rows = [row(0, "strict-match", exact_match=0.0), row(0, "flexible-extract", exact_match=1)]
    results = {"exact_match,strict-match": 0.0, "exact_match,flexible-extract": 1.0}
    report = build_task_report(facts(1), [make_record()], results, rows)
    assert {name: score.value for name, score in report.scores.items()} == {
        "exact_match,strict-match": 0.0,
        "exact_match,flexible-extract": 1.0,
    }
    assert scores_by_document(rows) == {
        0: {"exact_match,strict-match": 0.0, "exact_match,flexible-extract": 1.0}
    }


def test_aggregation_that_is_no_mean_gets_no_interval():
    report = build_task_report(facts(2), [], {"bleu,none": 31.2}, [row(0, bleu=1.0), row(1, bleu=0.0)])
    assert report.scores["bleu"].value == pytest.approx(31.2)
    assert report.scores["bleu"].interval is None


def test_report_is_json_with_definitions():
    task = build_task_report(facts(), [make_record()], None, [])
    report = RunReport("partial", "interrupted", "m", "sdar", "multi_bd", {"toy": task}, CostSummary())
    found = json.loads(report.as_json())
    assert found["status"] == "partial"
    assert found["schema_version"] == 1
    assert found["tasks"]["toy"]["accuracy"]["interval"]["method"] == "wilson95"
    assert "tokens_output" in found["definitions"]["tpf"]
