import json
import re

import pytest
import yaml

from diffulex_bench.errors import BenchError
from diffulex_bench.records import read_records
from diffulex_bench.run_folder import RunFolder, safe_name
from tests.support.bench import make_record


def test_folder_is_named_after_time_and_task_and_unique_within_a_second(tmp_path):
    names = [RunFolder(tmp_path, ["gsm"]).path.name for _ in range(5)]
    assert len(set(names)) == 5
    assert all(re.fullmatch(r"run_\d{8}_\d{6}_gsm(_\d+)?", name) for name in names)


def test_several_tasks_and_odd_names_make_a_usable_folder_name(tmp_path):
    assert RunFolder(tmp_path, ["a", "b"]).path.name.endswith("_a+b")
    assert safe_name("a/b c:d") == "a_b_c_d"
    assert len(safe_name("x" * 300)) == 96


def test_samples_are_in_the_file_as_soon_as_they_are_reported(tmp_path):
    folder = RunFolder(tmp_path, ["toy"])
    folder.on_sample(make_record(doc_id=1), [])
    folder.on_sample(make_record(doc_id=0), [])
    assert [record.doc_id for record in read_records(folder.samples_file("toy"))] == [1, 0]
    folder.rewrite_samples("toy", [make_record(doc_id=1), make_record(doc_id=0)])
    assert [record.doc_id for record in read_records(folder.samples_file("toy"))] == [0, 1]
    assert not list(folder.path.glob(".*"))


def test_trace_goes_into_its_own_file_with_the_samples_key(tmp_path):
    with RunFolder(tmp_path, ["toy"]) as folder:
        folder.on_sample(make_record(doc_id=2), [[0, "denoise", 0.1, 0, 16, []]])
    line = json.loads((folder.path / "trace_toy.jsonl").read_text())
    assert line == {"doc_id": 2, "repeat": 0, "steps": [[0, "denoise", 0.1, 0, 16, []]]}


def test_without_save_nothing_but_the_folder_appears(tmp_path):
    with RunFolder(tmp_path, ["toy"], save=False) as folder:
        folder.on_sample(make_record(), [[0]])
        folder.write_config({"engine": {}})
        folder.rewrite_samples("toy", [make_record()])
    assert list(folder.path.iterdir()) == []


def test_without_subdirectory_the_output_folder_itself_is_used_once(tmp_path):
    folder = RunFolder(tmp_path / "here", ["toy"], subdirectory=False)
    assert folder.path == tmp_path / "here"
    folder.write_config({"engine": {"block_size": 16}, "eval": {}})
    assert yaml.safe_load((folder.path / "config.yaml").read_text())["engine"]["block_size"] == 16
    with pytest.raises(BenchError, match="already holds a run"):
        RunFolder(tmp_path / "here", ["toy"], subdirectory=False)


@pytest.mark.parametrize("subdirectory", [True, False])
def test_output_folder_that_is_a_file_is_a_users_error(tmp_path, subdirectory):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BenchError, match="output_dir"):
        RunFolder(tmp_path / "file", ["toy"], subdirectory=subdirectory)
