import json

import pytest

from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.task_data import local_source, missing_split, read_rows
from diffulex_bench.task_files import (
    bundled_folder,
    find_config,
    find_user_path,
    include_folders,
    needs_hub,
    read_task_yaml,
    scan_tasks,
)


def test_bundled_folders_hold_the_tasks_and_configurations():
    found, broken = scan_tasks(bundled_folder("tasks"))
    assert {"gsm_symbolic_diffulex", "gsm8k_diffulex"} <= set(found)
    assert broken == {}
    assert (
        find_config("tiny_multi_bd")
        == find_config("tiny_multi_bd.yaml")
        == bundled_folder("configs") / "tiny_multi_bd.yaml"
    )


def test_bundled_configuration_is_found_by_its_checkout_path_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("configs/tiny_multi_bd.yaml").is_file()


def test_own_file_wins_over_a_bundled_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_multi_bd.yaml").write_text("engine: {}")
    assert find_config("tiny_multi_bd.yaml").absolute() == tmp_path / "tiny_multi_bd.yaml"


@pytest.mark.parametrize("name", ["nothing.yaml", "other/tiny_multi_bd.yaml"])
def test_missing_configuration_lists_the_bundled_ones(name):
    with pytest.raises(BenchError, match="tiny_multi_bd"):
        find_config(name)


def test_include_path_null_empty_and_folder(tmp_path):
    bundled = bundled_folder("tasks")
    assert include_folders(None, []) == [bundled]
    assert include_folders("", []) == []
    assert include_folders(str(tmp_path), [tmp_path]) == [bundled, tmp_path]
    (tmp_path / "file").write_text("x")
    with pytest.raises(BenchError, match="no folder"):
        include_folders("file", [tmp_path])
    with pytest.raises(BenchError, match="include_path names nowhere"):
        include_folders("nowhere", [tmp_path])


def test_user_path_is_taken_from_the_first_folder_that_holds_it(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    (two / "data").write_text("x")
    assert find_user_path("data", "s", [one, two]) == two / "data"
    (one / "data").write_text("x")
    assert find_user_path("data", "s", [one, two]) == one / "data"
    assert find_user_path(str(two / "data"), "s", [one]) == two / "data"
    with pytest.raises(BenchError) as caught:
        find_user_path("nope", "dataset_data_files", [one, two])
    assert str(one / "nope") in str(caught.value)
    assert str(two / "nope") in str(caught.value)


def test_task_yaml_is_read_with_what_it_includes_and_functions_as_text(tmp_path):
    (tmp_path / "base.yaml").write_text("a: 1\nb: 1\n")
    (tmp_path / "task.yaml").write_text(
        "include: base.yaml\ntask: t\nb: 2\ncustom_dataset: !function some.where\n"
    )
    assert read_task_yaml(tmp_path / "task.yaml") == {
        "a": 1,
        "b": 2,
        "task": "t",
        "custom_dataset": "some.where",
    }
    assert scan_tasks(tmp_path)[0] == {"t": tmp_path / "task.yaml"}


def test_task_file_that_does_not_parse_is_told_apart_from_one_without_a_task(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "plain.yaml").write_text("a: 1")
    found, broken = scan_tasks(tmp_path)
    assert found == {}
    assert list(broken) == [tmp_path / "bad.yaml"]


@pytest.mark.parametrize(
    ("name", "files", "needed"),
    [
        ("gsm_symbolic_diffulex", None, False),
        ("gsm8k_diffulex", None, True),
        ("gsm8k_diffulex", "x.jsonl", False),
        ("gsm_symbolic_diffulex,gsm8k_diffulex", None, True),
        ("somewhere_else", None, True),
    ],
)
def test_hub_is_needed_only_when_a_task_brings_no_data(name, files, needed):
    settings = EvalSettings(dataset_name=name, dataset_data_files=files)
    assert needs_hub(settings, [bundled_folder("tasks")]) is needed


def test_rows_are_read_from_json_lines_json_lists_csv_and_parquet(tmp_path):
    rows = [{"question": "a\u2028b", "answer": "1"}, {"question": "c", "answer": "2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.json").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "a.csv").write_text("question,answer\nc,2\n")
    import pandas as pd

    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "b.json", "a.parquet"):
        assert read_rows(tmp_path / name) == rows, name
    assert read_rows(tmp_path / "a.csv") == [{"question": "c", "answer": "2"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2"),
        ("a.json", "[1, 2", "no JSON list"),
        ("a.jsonl", "", "no records"),
        ("a.jsonl", "5\n", "record 1"),
        ("a.txt", "x", "known ending"),
    ],
)
def test_unusable_data_file_is_an_error_that_names_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(BenchError, match=message):
        read_rows(tmp_path / name)


def test_local_file_is_the_split_that_is_asked_for(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    found = local_source(tmp_path / "train.jsonl", "test")(version=1.0)
    assert list(found) == ["test"]
    assert found["test"].to_list() == [{"question": "q", "answer": "1"}]


def test_missing_split_lists_those_there_are():
    assert "train, test" in str(missing_split("t", "dev", ["train", "test"]))
