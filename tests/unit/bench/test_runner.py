"""Whole runs with a fake engine: files, verdicts, interruptions, failures."""

import json

import pytest
import yaml

from diffulex_bench import evaluation
from diffulex_bench.config import BenchConfig
from diffulex_bench.records import read_records
from tests.support.bench_runs import gold_answer, make_settings, run_with


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def results_of(outcome):
    return json.loads((outcome.folder / "results.json").read_text())


def test_run_folder_holds_every_promised_file(tmp_path):
    outcome, engine, text = run_with(make_settings(tmp_path), gold_answer)
    assert outcome.exit_code == 0
    assert engine.exited
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {
        "config.yaml", "environment.json", "results.json", "samples_gsm8k_diffulex.jsonl", "run.log",
        "lm_eval",
    }  # fmt: skip
    foreign = sorted(path.name.split("_2")[0] for path in (outcome.folder / "lm_eval").glob("*/*"))
    assert foreign == ["results", "samples_gsm8k_diffulex"]
    assert str(outcome.folder) in text
    log = (outcome.folder / "run.log").read_text()
    assert "lm_eval" in log
    assert "strict_match 100.0 %" in log


def test_results_and_samples_agree(tmp_path):
    outcome, _, _ = run_with(make_settings(tmp_path), gold_answer)
    found = results_of(outcome)
    task = found["tasks"]["gsm8k_diffulex"]
    records = read_records(outcome.folder / "samples_gsm8k_diffulex.jsonl")
    assert found["status"] == "complete"
    assert [record.doc_id for record in records] == list(range(6))
    assert task["costs"]["tokens_output"] == sum(record.tokens_output for record in records)
    assert task["costs"]["stop_reasons"] == {"eos_token_generated": 6}
    assert task["accuracy"]["value"] == 1.0
    assert task["accuracy"]["interval"]["low"] == pytest.approx(0.6097, abs=1e-4)
    assert all(record.scores == {"strict_match": 1.0, "flexible_match": 1.0} for record in records)
    lm_eval_file = next((outcome.folder / "lm_eval").glob("*/results_*.json"))
    assert json.loads(lm_eval_file.read_text())["results"]["gsm8k_diffulex"]["strict_match,none"] == 1.0


def test_task_value_holds_until_the_user_writes_one(tmp_path):
    _, engine, _ = run_with(make_settings(tmp_path / "a"), gold_answer)
    assert {params.max_tokens for _, params in engine.seen} == {512}
    outcome, engine, _ = run_with(make_settings(tmp_path / "b", max_tokens=256), gold_answer)
    assert {params.max_tokens for _, params in engine.seen} == {256}
    assert results_of(outcome)["tasks"]["gsm8k_diffulex"]["generation"]["max_tokens"] == {
        "value": 256,
        "origin": "eval",
    }


@pytest.mark.parametrize(("limit", "expected"), [(2, 2), (10**9, 6), (None, 6)])
def test_limit_counts_documents_and_a_larger_one_is_the_whole_set(tmp_path, limit, expected):
    outcome, engine, _ = run_with(make_settings(tmp_path, dataset_limit=limit), gold_answer)
    assert len(engine.seen) == expected
    task = results_of(outcome)["tasks"]["gsm8k_diffulex"]
    assert (task["num_expected"], task["num_finished"], task["num_documents"]) == (expected, expected, 6)


def test_interrupted_run_keeps_what_was_finished_and_says_partial(tmp_path):
    outcome, engine, text = run_with(make_settings(tmp_path), gold_answer, interrupt_after=4)
    assert outcome.exit_code == 130
    assert engine.exited
    records = read_records(outcome.folder / "samples_gsm8k_diffulex.jsonl")
    assert [record.doc_id for record in records] == [2, 3, 4, 5]
    found = results_of(outcome)
    assert found["status"] == "partial"
    assert found["tasks"]["gsm8k_diffulex"]["num_finished"] == 4
    assert found["tasks"]["gsm8k_diffulex"]["accuracy"]["value"] == 1.0
    assert "4 of 6" in text
    assert "interrupted by the user" in text


def test_crash_while_scoring_loses_no_sample(tmp_path, monkeypatch):
    def crash(*_, **__):
        raise KeyError("scoring")

    monkeypatch.setattr("lm_eval.evaluator._process_results", crash)
    outcome, _, _ = run_with(make_settings(tmp_path), gold_answer)
    assert outcome.exit_code == 1
    assert len(read_records(outcome.folder / "samples_gsm8k_diffulex.jsonl")) == 6
    found = results_of(outcome)
    assert (found["status"], found["reason"]) == ("partial", "KeyError: 'scoring'")
    assert found["tasks"]["gsm8k_diffulex"]["accuracy"]["value"] == 1.0
    assert "Traceback" in (outcome.folder / "run.log").read_text()


def test_lm_eval_that_cannot_save_is_told_about(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.loggers.evaluation_tracker.asdict", None)
    outcome, _, text = run_with(make_settings(tmp_path), gold_answer)
    assert outcome.exit_code == 0
    assert "lm-eval did not write its file results_*" in text


def test_without_save_results_only_the_log_is_written(tmp_path):
    outcome, _, text = run_with(make_settings(tmp_path, save_results=False), gold_answer)
    assert [path.name for path in outcome.folder.iterdir()] == ["run.log"]
    assert "strict_match 100.0 %" in text
    assert "strict_match 100.0 %" in (outcome.folder / "run.log").read_text()


def test_without_subdirectory_files_stand_in_the_output_folder(tmp_path):
    outcome, _, _ = run_with(make_settings(tmp_path, use_run_subdirectory=False), gold_answer)
    assert outcome.folder == tmp_path / "out"
    assert (tmp_path / "out" / "results.json").is_file()


def test_config_of_a_run_runs_again_with_the_same_answers(tmp_path):
    first, engine, _ = run_with(make_settings(tmp_path), gold_answer)
    again, other, _ = run_with(first.folder / "config.yaml", gold_answer)
    assert again.exit_code == 0
    assert other.seen == engine.seen
    assert yaml.safe_load((again.folder / "config.yaml").read_text())["eval"]["dataset_data_files"].endswith(
        "jsonl"
    )


def test_foreign_task_gets_its_scores_from_lm_eval(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "gsm8k_diffulex.yaml").write_text(
        'task: gsm8k_diffulex\ntest_split: test\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        "generation_kwargs: {until: []}\nrepeats: 2\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    config = make_settings(tmp_path, include_path=str(folder))
    outcome, _, _ = run_with(config, lambda text: "0+0=0\n#### 0" if "What is 0" in text else "no")
    records = read_records(outcome.folder / "samples_gsm8k_diffulex.jsonl")
    assert len(records) == 12
    assert [record.scores for record in records[:4]] == [{"exact_match": 1.0}, {}, {"exact_match": 0.0}, {}]
    task = results_of(outcome)["tasks"]["gsm8k_diffulex"]
    assert task["accuracy"]["value"] == pytest.approx(1 / 6)
    assert task["accuracy"]["num_samples"] == 6


def test_probes_of_the_host_are_off_during_a_run_and_back_afterwards(tmp_path):
    before = evaluation.evaluator.add_env_info
    outcome, _, _ = run_with(make_settings(tmp_path), gold_answer)
    text = next((outcome.folder / "lm_eval").glob("*/results_*.json")).read_text()
    assert "pretty_env_info" not in text
    assert evaluation.evaluator.add_env_info is before


def test_chat_template_that_is_missing_is_told_before_tasks_load(tmp_path):
    bench = BenchConfig.load([make_settings(tmp_path, apply_chat_template=True)])
    with pytest.raises(ValueError, match="has no chat template"):
        bench.check_chat_template()


def test_terminated_run_keeps_what_was_finished_and_ends_with_143(tmp_path):
    outcome, engine, text = run_with(
        make_settings(tmp_path), gold_answer, interrupt_after=4, interrupt=SystemExit(143)
    )
    assert (outcome.exit_code, engine.exited) == (143, True)
    assert len(read_records(outcome.folder / "samples_gsm8k_diffulex.jsonl")) == 4
    found = results_of(outcome)
    assert (found["status"], found["reason"]) == ("partial", "terminated by SIGTERM")
    assert "4 of 6" in text


def test_written_configuration_holds_what_the_engine_measured_and_the_origins(tmp_path):
    outcome, _, _ = run_with(make_settings(tmp_path), gold_answer)
    document = yaml.safe_load((outcome.folder / "config.yaml").read_text())
    assert document["engine"]["num_pages"] == 77
    assert document["origins"]["engine"]["num_pages"] == "measured at start"
    assert document["origins"]["engine"]["model_path"].startswith("yaml ")
    again = BenchConfig.load([outcome.folder / "config.yaml"])
    assert "num_pages" not in again.engine_config.explicit
