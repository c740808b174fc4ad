"""``diffulex-bench inspect`` in processes of its own, as a user runs it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from diffulex_bench.tiny import bundled_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not (bundled_model("tiny-sdar") / "model.safetensors").is_file(),
    reason="the bundled checkpoint is not in this tree",
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "diffulex_bench", *words], capture_output=True, text=True)


def test_bundled_model_is_described_and_its_command_runs(tmp_path: Path) -> None:
    done = run("inspect", "bundled:tiny-sdar", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["recognition"]["names"] == ["sdar"]
    assert found["fits"][0]["place"] == "host"
    assert found["fits"][0]["verdict"] == "fits"
    weights = bundled_model("tiny-sdar") / "model.safetensors"
    assert 0 < weights.stat().st_size - found["size"]["by_dtype"]["BF16"]["bytes"] < 20_000
    words = shlex.split(found["command"])[1:]
    ran = run(*words, "--dataset-limit", "2", "--output-dir", str(tmp_path), "--no-show-progress")
    assert ran.returncode == 0, ran.stderr
    assert next(tmp_path.glob("run_*/results.json")).is_file()


def test_plain_output_is_lines_of_text() -> None:
    done = run("inspect", "bundled:tiny-sdar")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "bundled:tiny-sdar"
    assert any(line.startswith("model names") and "sdar" in line for line in lines)
    assert any(line.startswith("run it: diffulex-bench ") for line in lines)
    assert "\x1b" not in done.stdout


def test_damaged_copy_is_told_with_code_2(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundled_model("tiny-sdar"), folder)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(1_000_000)
    (folder / "tokenizer.json").unlink()
    done = run("inspect", str(folder))
    assert done.returncode == 2
    assert done.stdout.count("problem: ") == 2
    assert "Traceback" not in done.stdout + done.stderr
