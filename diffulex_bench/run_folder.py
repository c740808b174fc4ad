"""The folder of one run and its files; samples are on disk the moment they are finished.

``output_dir/run_<YYYYmmdd_HHMMSS>_<task>/`` holds ``config.yaml``, ``environment.json``, ``results.json``,
``samples_<task>.jsonl``, ``trace_<task>.jsonl`` with ``save_trace``, ``run.log``, and lm-eval's own files in
``lm_eval/``. Without ``save_results`` only ``run.log`` is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import yaml

from diffulex.logger import get_logger
from diffulex_bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from diffulex.utils.output import StepReport
    from diffulex_bench.provenance import Environment
    from diffulex_bench.records import SampleRecord
    from diffulex_bench.report import RunReport

logger = get_logger(__name__)

_MAX_NAME = 96
_RESULT_FILES = ("results.json", "config.yaml", "samples_*.jsonl")


class RunFolder:
    """Owner of a run's files and a listener of the lm-eval adapter; used as a context manager.

    Raises:
        BenchError: the folder cannot be made, or without subdirectories already holds a run.
    """

    def __init__(
        self, output_dir: Path, task_names: Sequence[str], *, subdirectory: bool = True, save: bool = True
    ) -> None:
        self.save = save
        try:
            self.path = (
                _unique_folder(output_dir, task_names) if subdirectory else _plain_folder(output_dir)
            ).absolute()
        except OSError as error:
            raise BenchError(
                f"output_dir {output_dir} cannot be used ({error}); choose another one"
            ) from error
        self.log_file = self.path / "run.log"
        self._files: dict[Path, IO[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    # Listener --------------------------------------------------------------------------------------------

    def on_start(self, task: str, num_requests: int) -> None:
        """Nothing to do; files appear with the first sample."""

    def on_step(self, report: StepReport) -> None:
        """Nothing to do."""

    def on_sample(self, record: SampleRecord, trace: list[list[Any]]) -> None:
        """The sample's line, and that of its trace if there is one, are in their files."""
        if not self.save:
            return
        self._append(self.samples_file(record.task), record.as_json())
        if trace:
            line = json.dumps({"doc_id": record.doc_id, "repeat": record.repeat, "steps": trace})
            self._append(self.path / f"trace_{safe_name(record.task)}.jsonl", line)

    def samples_file(self, task: str) -> Path:
        """Where the samples of ``task`` stand."""
        return self.path / f"samples_{safe_name(task)}.jsonl"

    # Whole files -----------------------------------------------------------------------------------------

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """``config.yaml``: resolved values under ``engine`` and ``eval``, who set them under ``origins``."""
        head = "# Resolved settings of this run; origins says where each value came from.\n"
        self._replace(
            "config.yaml", head + yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        )

    def write_environment(self, environment: Environment) -> None:
        """``environment.json``."""
        text = json.dumps(dataclasses.asdict(environment), indent=2, ensure_ascii=False)
        self._replace("environment.json", text + "\n")

    def write_results(self, report: RunReport) -> None:
        """``results.json``."""
        self._replace("results.json", report.as_json())

    def rewrite_samples(self, task: str, records: Sequence[SampleRecord]) -> None:
        """The samples of ``task`` in order of document and repeat, replacing the file in one step."""
        self._close()
        lines = [record.as_json() + "\n" for record in sorted(records, key=lambda record: record.key)]
        self._replace(self.samples_file(task).name, "".join(lines))

    def _append(self, path: Path, line: str) -> None:
        if path not in self._files:
            self._files[path] = path.open("a", encoding="utf-8")
        self._files[path].write(line + "\n")
        self._files[path].flush()

    def _replace(self, name: str, text: str) -> None:
        if not self.save:
            return
        part = self.path / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(self.path / name)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def safe_name(name: str) -> str:
    """``name`` with everything but letters, digits and ``.+_-`` replaced by ``_``, at most 96 characters."""
    return re.sub(r"[^\w.+-]+", "_", name)[:_MAX_NAME]


def _unique_folder(output_dir: Path, task_names: Sequence[str]) -> Path:
    """A folder that did not exist before; runs within one second get a number."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d_%H%M%S")
    base = f"run_{stamp}_{safe_name('+'.join(Path(name).stem for name in task_names))}"
    number = 1
    while True:
        path = output_dir / (base if number == 1 else f"{base}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not output_dir.is_dir():
                raise
            number += 1
            continue
        return path


def _plain_folder(output_dir: Path) -> Path:
    output_dir.mkdir(parents=True, exist_ok=True)
    taken = [path.name for pattern in _RESULT_FILES for path in sorted(output_dir.glob(pattern))]
    if taken:
        raise BenchError(
            f"output_dir {os.fspath(output_dir)} already holds a run ({taken[0]}); choose another folder or "
            "set use_run_subdirectory to true"
        )
    return output_dir
