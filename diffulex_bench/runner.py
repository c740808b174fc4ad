"""One benchmark run from settings to report: tasks, then the engine, then lm-eval, then the files.

Called by `diffulex_bench.main`. Whatever happens after the engine has started, finished samples are on disk
and ``results.json`` says whether it is complete.
"""

from __future__ import annotations

import dataclasses
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diffulex.logger import get_logger
from diffulex_bench.generation import plan_generation
from diffulex_bench.metrics import summarise_costs
from diffulex_bench.report import RunReport, TaskFacts, build_task_report, scores_by_document
from diffulex_bench.run_folder import RunFolder
from diffulex_bench.step_times import StepTimes
from diffulex_bench.summary import print_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffulex.config import Config
    from diffulex_bench.config import BenchConfig
    from diffulex_bench.lm_eval_model import DiffulexLM, Engine
    from diffulex_bench.records import SampleRecord
    from diffulex_bench.report import Status
    from diffulex_bench.run_logs import RunLogs
    from diffulex_bench.tasks import LoadedTasks

logger = get_logger(__name__)

INTERRUPTED = 130
#: The engine answers SIGTERM with ``SystemExit(143)``.
TERMINATED = 143
FAILED = 1


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: exit code, its folder, its report (None when it ended before the engine was ready)."""

    exit_code: int
    folder: Path
    report: RunReport | None


def run_benchmark(
    bench: BenchConfig,
    logs: RunLogs,
    *,
    console: Console,
    make_engine: Callable[[Config], Engine] | None = None,
    command: Sequence[str] = (),
) -> RunOutcome:
    """Runs the tasks of ``bench`` and writes the run folder.

    Raises:
        ConfigError: a setting cannot be used; like the next two raised before weights load.
        CheckpointError: the checkpoint folder cannot be used.
        BenchError: a task, a data file or the output folder cannot be used.
    """
    from diffulex_bench.lm_eval_model import build_engine
    from diffulex_bench.tasks import load_tasks

    config = bench.engine_config
    bench.check_chat_template()
    tasks = load_tasks(bench)
    settings = bench.eval
    folder = RunFolder(
        Path(settings.output_dir),
        list(tasks.tasks),
        subdirectory=settings.use_run_subdirectory,
        save=settings.save_results,
    )
    logs.move_to(folder.log_file)
    run = _Run(bench, config, tasks, folder, console, logs.console)
    with folder, ExitStack() as stack:
        run.write_provenance(command)
        logger.info("loading %s", config.model)
        engine = (make_engine or build_engine)(config)
        stack.callback(engine.exit)
        run.note_measured(engine.config)
        return run.execute(engine)


class _Run:
    """The state of one run while lm-eval works."""

    def __init__(
        self,
        bench: BenchConfig,
        config: Config,
        tasks: LoadedTasks,
        folder: RunFolder,
        console: Console,
        log_console: Console,
    ) -> None:
        self.bench = bench
        self.config = config
        self.tasks = tasks
        self.folder = folder
        self.console = console
        self.log_console = log_console
        self.times = StepTimes()

    def write_provenance(self, command: Sequence[str]) -> None:
        from diffulex_bench.provenance import describe_environment

        self.folder.write_config(self.bench.as_document())
        self.folder.write_environment(describe_environment(self.config, self.bench.eval.eval_seed, command))

    def note_measured(self, config: Config) -> None:
        """``config.yaml`` also holds what the engine measured when it started."""
        self.folder.write_config(self.bench.as_document(config))

    def execute(self, engine: Engine) -> RunOutcome:
        """Evaluates, and reports what there is however the evaluation ends."""
        from diffulex_bench.evaluation import evaluate
        from diffulex_bench.lm_eval_model import DiffulexLM
        from diffulex_bench.progress import RunProgress

        lm_eval_folder = self.folder.path / "lm_eval" if self.folder.save else None

        settings = self.bench.eval
        num_requests = self.tasks.num_requests(settings.dataset_limit)
        with RunProgress(num_requests, enabled=settings.show_progress, console=self.log_console) as progress:
            lm = DiffulexLM(
                engine=engine,
                bench=self.bench,
                graders=self.tasks.graders,
                listeners=(self.folder, progress, self.times),
            )
            try:
                results = evaluate(lm, self.bench, self.tasks, lm_eval_folder)
            except KeyboardInterrupt:
                progress.stop()
                return self._conclude(lm, None, INTERRUPTED, "interrupted by the user")
            except SystemExit as end:
                progress.stop()
                code = end.code if isinstance(end.code, int) else FAILED
                reason = "terminated by SIGTERM" if code == TERMINATED else f"ended with exit code {code}"
                return self._conclude(lm, None, code, reason)
            except Exception as error:  # noqa: BLE001  # finished samples are kept and reported whatever failed
                progress.stop()
                logger.error("the run failed: %s: %s", type(error).__name__, error)
                logger.debug("%s", traceback.format_exc())
                return self._conclude(lm, None, FAILED, f"{type(error).__name__}: {error}")
        return self._conclude(lm, results, 0, None)

    def _conclude(
        self, lm: DiffulexLM, results: dict[str, Any] | None, exit_code: int, reason: str | None
    ) -> RunOutcome:
        """Files and summary of a finished, interrupted or failed run."""
        report = self._report(lm, results, "complete" if reason is None else "partial", reason)
        self._save_samples(lm.records, results)
        self.folder.write_results(report)
        print_summary(report, self.folder.path, saved=self.folder.save, console=self.console)
        copy = StringIO()
        print_summary(report, self.folder.path, saved=self.folder.save, console=Console(file=copy, width=160))
        logger.debug("summary\n%s", copy.getvalue())
        return RunOutcome(exit_code, self.folder.path, report)

    def _report(
        self, lm: DiffulexLM, results: dict[str, Any] | None, status: Status, reason: str | None
    ) -> RunReport:
        settings, reports = self.bench.eval, {}
        for name, task in self.tasks.tasks.items():
            num_documents = len(task.eval_docs)
            num_asked = min(num_documents, settings.dataset_limit or num_documents)
            plan = plan_generation(
                settings, self.bench.explicit_eval, task.config.generation_kwargs or {}, f"task {name}"
            )
            reports[name] = build_task_report(
                TaskFacts(num_asked * int(task.config.repeats), num_documents, plan),
                [record for record in lm.records if record.task == name],
                results["results"][name] if results else None,
                results["samples"][name] if results else [],
            )
        return RunReport(
            status=status,
            reason=reason,
            model=self.bench.model_label,
            model_name=self.config.model_name,
            strategy=self.config.decoding_strategy,
            tasks=reports,
            total=summarise_costs(lm.records),
            time=self.times.split(),
        )

    def _save_samples(self, records: list[SampleRecord], results: dict[str, Any] | None) -> None:
        """Samples in document order; scores that only lm-eval knows are filled in."""
        for name in self.tasks.tasks:
            own = [record for record in records if record.task == name]
            if results is not None and self.tasks.graders.get(name) is None:
                found = scores_by_document(results["samples"][name])
                own = [
                    dataclasses.replace(record, scores=found.get(record.doc_id, {}))
                    if record.repeat == 0
                    else record
                    for record in own
                ]
            if own:
                self.folder.rewrite_samples(name, own)
