"""Whole bench runs in tests: a stub checkpoint, a GSM8K-like file, a run with a fake engine."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any
from unittest import mock

import yaml
from rich.console import Console

from diffulex_bench.config import BenchConfig
from diffulex_bench.run_logs import RunLogs
from diffulex_bench.runner import run_benchmark
from tests.support.bench import FakeEngine
from tests.support.checkpoints import write_stub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diffulex_bench.runner import RunOutcome

#: What a run may set in the environment of its process.
SEEN_VARIABLES = (
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
)


def write_problems(path: Path, num: int = 6) -> Path:
    """GSM8K-like problems: problem i asks for i + i and its answer is 2 i."""
    rows = [
        {"question": f"What is {i} + {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gold_answer(prompt: str) -> str:
    """The right answer to a problem of `write_problems`."""
    number = int(prompt.split("What is ")[1].split(" ")[0])
    return f"Twice {number}.\n#### {2 * number}"


def make_settings(folder: Path, **evaluation: Any) -> Path:
    """A configuration file for the stub checkpoint and the task gsm8k_diffulex on a local file."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_stub(folder / "model", 64, mask_id=0, eos_ids=(1,))
    data = write_problems(folder / "problems.jsonl")
    settings = {
        "engine": {"model_path": str(model), "model_name": "sdar", "decoding_strategy": "multi_bd"},
        "eval": {
            "dataset_name": "gsm8k_diffulex",
            "dataset_data_files": str(data),
            "output_dir": str(folder / "out"),
            **evaluation,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run_with(
    config_file: Path, answer: Callable[[str], str], /, **engine: Any
) -> tuple[RunOutcome, FakeEngine, str]:
    """A run of ``config_file`` with an engine that answers by ``answer``: outcome, engine, terminal text."""
    fake = FakeEngine(answer, **engine)
    out = StringIO()
    console = Console(file=out, width=200)
    with RunLogs(console) as logs:
        outcome = run_benchmark(
            BenchConfig.load([config_file]), logs, console=console, make_engine=fake.start
        )
    return outcome, fake, out.getvalue()


@contextmanager
def clean_environment(**values: str) -> Iterator[None]:
    """The process's environment with ``values``, put back afterwards."""
    with mock.patch.dict(os.environ, values):
        for name in SEEN_VARIABLES:
            if name not in values:
                os.environ.pop(name, None)
        yield
