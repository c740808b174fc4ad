import logging

import pytest

from diffulex_bench.config import BenchConfig
from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.scoring import grade_number
from diffulex_bench.tasks import load_tasks
from tests.support.bench_runs import write_problems

LOCAL_TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl, dev: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def bench(tmp_path, **evaluation):
    values = {"include_path": str(tmp_path / "tasks"), "dataset_name": "mine", **evaluation}
    return BenchConfig({}, {}, EvalSettings(**values), dict.fromkeys(values, "flag"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tasks").mkdir()
    write_problems(tmp_path / "tasks" / "rows.jsonl", 4)
    return tmp_path / "tasks"


@pytest.fixture(autouse=True)
def _offline_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_task(folder, text=LOCAL_TASK, name="mine"):
    (folder / f"{name}.yaml").write_text(text)


def test_data_file_beside_the_task_yaml_is_found_from_any_working_folder(folder, tmp_path, monkeypatch):
    write_task(folder)
    monkeypatch.chdir(tmp_path)
    loaded = load_tasks(bench(tmp_path))
    assert len(loaded.tasks["mine"].eval_docs) == 4
    assert loaded.num_requests(None) == 4
    assert loaded.num_requests(3) == 3
    assert loaded.num_requests(10**9) == 4
    assert loaded.graders == {"mine": None}


def test_written_split_is_taken_and_a_missing_one_lists_those_there_are(folder, tmp_path):
    write_task(folder)
    assert load_tasks(bench(tmp_path, dataset_split="dev")).tasks["mine"].config.test_split == "dev"
    with pytest.raises(BenchError, match="no split 'validation'; set dataset_split to one of test, dev"):
        load_tasks(bench(tmp_path, dataset_split="validation"))


def test_split_of_a_generated_task_is_checked_too():
    values = {"dataset_name": "gsm_symbolic_diffulex", "dataset_split": "train"}
    with pytest.raises(BenchError, match="no split 'train'; set dataset_split to one of test"):
        load_tasks(BenchConfig({}, {}, EvalSettings(**values), dict.fromkeys(values, "flag")))


@pytest.mark.parametrize("split", ["test", "train", "anything"])
def test_single_local_file_is_used_whatever_the_split_is_called(tmp_path, split):
    data = write_problems(tmp_path / "GSM8K.jsonl", 5)
    values = {"dataset_name": "gsm8k_diffulex", "dataset_data_files": str(data), "dataset_split": split}
    loaded = load_tasks(BenchConfig({}, {}, EvalSettings(**values), dict.fromkeys(values, "flag")))
    task = loaded.tasks["gsm8k_diffulex"]
    assert len(task.eval_docs) == 5
    assert task.doc_to_text(task.eval_docs[1]) == "What is 1 + 1?\n"
    assert loaded.graders == {"gsm8k_diffulex": grade_number}


def test_task_may_be_named_by_the_path_of_its_yaml(folder, tmp_path):
    write_task(folder)
    assert list(load_tasks(bench(tmp_path, dataset_name=str(folder / "mine.yaml"))).tasks) == ["mine"]


def test_several_tasks_and_groups_are_loaded(folder, tmp_path):
    write_task(folder)
    write_task(folder, LOCAL_TASK.replace("task: mine", "task: other"), "other")
    write_task(folder, "group: both\ntask: [mine, other]\n", "both")
    assert list(load_tasks(bench(tmp_path, dataset_name="mine,other")).tasks) == ["mine", "other"]
    loaded = load_tasks(bench(tmp_path, dataset_name="both"))
    assert list(loaded.tasks) == ["mine", "other"]
    assert len(loaded.specs) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("output_type: loglikelihood", "log-likelihoods"),
        ("unsafe_code: true", "confirm_run_unsafe_code"),
        ("doc_to_image: [picture]", "images"),
        ("generation_kwargs: {max_gen_toks: lots}", "max_tokens of task mine"),
        ("process_results: !function nowhere.at_all", "cannot be loaded"),
        ("filter_list: [{name: x, filter: [{function: no_such_filter}]}]", "cannot be loaded"),
    ],
)
def test_task_that_cannot_be_run_is_refused_with_its_name(folder, tmp_path, line, message):
    write_task(folder, LOCAL_TASK.replace("output_type: generate_until\n", "") + line + "\n")
    with pytest.raises(BenchError, match=message) as caught:
        load_tasks(bench(tmp_path))
    assert "mine" in str(caught.value)


def test_code_task_runs_once_it_is_confirmed(folder, tmp_path):
    write_task(folder, LOCAL_TASK + "unsafe_code: true\n")
    assert list(load_tasks(bench(tmp_path, confirm_run_unsafe_code=True)).tasks) == ["mine"]


def test_unknown_task_names_near_ones_and_files_that_did_not_parse(folder, tmp_path, caplog):
    write_task(folder)
    (folder / "broken.yaml").write_text("task: [unfinished")
    with caplog.at_level(logging.INFO, "diffulex_bench"), pytest.raises(BenchError) as caught:
        load_tasks(bench(tmp_path, dataset_name="gsm8k_difulex"))
    assert "did you mean gsm8k_diffulex" in str(caught.value)
    assert "broken.yaml" in str(caught.value)


def test_hub_that_cannot_be_reached_is_one_error_that_names_the_option(monkeypatch):
    import datasets

    def unreachable(**_):
        raise ConnectionError("Couldn't reach the Hub\nwith many lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(BenchError, match=r"gsm8k_diffulex.*openai/gsm8k.*--dataset-data-files") as caught:
        load_tasks(BenchConfig({}, {}, EvalSettings()))
    assert "\n" not in str(caught.value)
