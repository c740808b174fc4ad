"""The command on the bundled model, in processes of its own, as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from diffulex_bench.records import read_records
from diffulex_bench.tiny import bundled_model

pytestmark = pytest.mark.skipif(
    not (bundled_model("tiny-sdar") / "model.safetensors").is_file(),
    reason="the bundled checkpoint is not in this tree",
)

BLOCK_SOCKETS = """
import socket
def refuse(*_, **__):
    raise OSError("network is blocked in this test")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


def start(arguments, *, prelude="", **variables):
    code = f"import sys\n{prelude}\nfrom diffulex_bench.main import main\nsys.exit(main({arguments!r}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(arguments, **more):
    process = start(arguments, **more)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def only_run(folder):
    (found,) = folder.glob("run_*")
    return found


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A run of five samples with traces, sockets blocked and a launcher's variables set."""
    folder = tmp_path_factory.mktemp("traced")
    arguments = [
        "--config",
        "tiny_multi_bd",
        "--dataset-limit",
        "5",
        "--save-trace",
        "--output-dir",
        str(folder),
    ]
    code, out, err = run(arguments, prelude=BLOCK_SOCKETS, LOCAL_RANK="1", RANK="1", WORLD_SIZE="2")
    assert code == 0, err
    return only_run(folder), out


def test_bundled_model_runs_with_sockets_blocked_and_launcher_variables_set(traced):
    folder, out = traced
    results = json.loads((folder / "results.json").read_text())
    task = results["tasks"]["gsm_symbolic_diffulex"]
    assert (results["status"], results["strategy"], results["model"]) == (
        "complete",
        "multi_bd",
        "bundled:tiny-sdar",
    )
    assert task["num_finished"] == 5
    assert task["accuracy"]["value"] > 0
    assert task["costs"]["tpf"] > 3
    time = results["time"]
    assert time["total"] == pytest.approx(
        time["prefill"] + time["decode"] + time["rebuild"] + time["other"], rel=1e-6
    )
    assert min(time["prefill"], time["decode"], time["other"]) > 0
    assert set(time["parts"]) == {"schedule", "prepare", "forward", "sample", "post"}
    assert sum(time["rows"].values()) == results["total"]["tokens_forwarded"]
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["engine"]["num_pages"] > 0
    assert "gsm_symbolic_diffulex" in out
    assert str(folder) in out
    assert list((folder / "lm_eval").glob("*/samples_gsm_symbolic_diffulex_*.jsonl"))


def test_samples_are_real_answers_to_the_documented_problems(traced):
    from diffulex_bench.tiny.data import test_problems as make_problems

    records = read_records(traced[0] / "samples_gsm_symbolic_diffulex.jsonl")
    assert [record.prompt for record in records] == [problem.prompt for problem in make_problems(5)]
    assert all("####" in record.output for record in records)
    assert all(record.tokens_output == len(record.output_token_ids) > 0 for record in records)


def test_trace_fills_every_position_of_every_answer_once(traced):
    folder = traced[0]
    records = {
        record.doc_id: record for record in read_records(folder / "samples_gsm_symbolic_diffulex.jsonl")
    }
    traces = [
        json.loads(line) for line in (folder / "trace_gsm_symbolic_diffulex.jsonl").read_text().splitlines()
    ]
    assert len(traces) == 5
    for trace in traces:
        record = records[trace["doc_id"]]
        filled = {position: token for step in trace["steps"] for position, token, _ in step[5]}
        answer = [filled[record.num_prompt_tokens + i] for i in range(record.tokens_output)]
        assert answer == record.output_token_ids
        assert len(trace["steps"]) == record.nfe["total"]


def test_written_configuration_gives_the_same_tokens_in_other_batches(traced, tmp_path):
    folder = traced[0]
    code, _, err = run(
        [
            "--config",
            str(folder / "config.yaml"),
            "--max-num-reqs",
            "2",
            "--output-dir",
            str(tmp_path),
            "--no-save-trace",
        ]
    )
    assert code == 0, err
    name = "samples_gsm_symbolic_diffulex.jsonl"
    before, after = read_records(folder / name), read_records(only_run(tmp_path) / name)
    assert [r.output_token_ids for r in after] == [r.output_token_ids for r in before]
    assert [r.nfe["denoise"] for r in after] == [r.nfe["denoise"] for r in before]
    assert not list(only_run(tmp_path).glob("trace_*"))


def test_sampled_answers_do_not_depend_on_how_many_documents_run(tmp_path):
    found = []
    for limit in ("2", "4"):
        folder = tmp_path / limit
        arguments = [
            "--config",
            "tiny_single_bd",
            "--dataset-limit",
            limit,
            "--temperature",
            "1.0",
            "--output-dir",
            str(folder),
        ]
        assert run(arguments)[0] == 0
        found.append(read_records(only_run(folder) / "samples_gsm_symbolic_diffulex.jsonl"))
    assert [record.output_token_ids for record in found[1][:2]] == [
        record.output_token_ids for record in found[0]
    ]


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [(signal.SIGINT, 130, "interrupted by the user"), (signal.SIGTERM, 143, "terminated by SIGTERM")],
)
def test_stopped_run_keeps_finished_samples_and_its_exit_code_says_how_it_ended(tmp_path, sent, code, words):
    process = start(
        [
            "--config",
            "tiny_single_bd",
            "--max-num-reqs",
            "1",
            "--dataset-limit",
            "400",
            "--output-dir",
            str(tmp_path),
        ]
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        samples = list(tmp_path.glob("run_*/samples_*.jsonl"))
        if samples and samples[0].read_text().count("\n") >= 3:
            break
        time.sleep(0.05)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    folder = only_run(tmp_path)
    results = json.loads((folder / "results.json").read_text())
    records = read_records(folder / "samples_gsm_symbolic_diffulex.jsonl")
    assert results["status"] == "partial"
    assert 3 <= len(records) == results["tasks"]["gsm_symbolic_diffulex"]["num_finished"] < 400
    assert words in out


def test_module_and_config_command_work(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "diffulex_bench", "config", "--explain", "--config", "tiny_multi_bd"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "engine.model_path = bundled:tiny-sdar  # yaml " in done.stdout
    assert "engine.accept_threshold = 0.9" in done.stdout


def test_bundled_configurations_resolve_and_differ_only_where_they_say():
    from diffulex_bench.config import BenchConfig
    from diffulex_bench.task_files import find_config

    multi, single = (BenchConfig.load([find_config(name)]) for name in ("tiny_multi_bd", "tiny_single_bd"))
    assert multi.eval == single.eval
    changed = {
        name
        for name, value in multi.engine_config.as_dict().items()
        if single.engine_config.as_dict()[name] != value
    }
    assert changed == {"buffer_size"}
    assert yaml.safe_dump(multi.as_document())
