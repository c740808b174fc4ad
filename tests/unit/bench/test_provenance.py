import json
import subprocess
from dataclasses import asdict

from diffulex_bench.config import BenchConfig
from diffulex_bench.provenance import commit_of, describe_environment
from tests.support.bench_runs import make_settings


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_commit_is_that_of_the_folder_and_says_when_files_changed(tmp_path):
    assert commit_of(tmp_path) is None
    git(tmp_path, "init")
    assert commit_of(tmp_path) is None
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_environment_says_what_decides_about_numbers_and_nothing_about_the_person(tmp_path):
    config = BenchConfig.load([make_settings(tmp_path)]).engine_config
    found = asdict(describe_environment(config, 5, ["diffulex-bench", "--x"]))
    assert found["packages"]["torch"]
    assert found["packages"]["lm-eval"]
    assert found["compute"]["dtype"] == "float32"
    assert found["compute"]["torch_threads"] >= 1
    assert found["seeds"] == {"engine": 0, "eval": 5}
    assert list(found["checkpoint"]["weight_files"]) == ["model.safetensors"]
    assert len(found["checkpoint"]["config_sha256"]) == 64
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {
        "time",
        "command",
        "python",
        "platform",
        "packages",
        "commit",
        "compute",
        "seeds",
        "checkpoint",
    }
