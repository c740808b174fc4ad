"""The call into lm-eval: `simple_evaluate` with our model, tasks and seeds, and lm-eval's own files."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lm_eval import evaluator
from lm_eval.loggers import EvaluationTracker

from diffulex.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from diffulex_bench.config import BenchConfig
    from diffulex_bench.lm_eval_model import DiffulexLM
    from diffulex_bench.tasks import LoadedTasks

logger = get_logger(__name__)


def evaluate(lm: DiffulexLM, bench: BenchConfig, tasks: LoadedTasks, folder: Path | None) -> dict[str, Any]:
    """lm-eval's results, ``samples`` included; its own files stand below ``folder`` unless that is None.

    Raises:
        RuntimeError: lm-eval returned nothing.
    """
    settings = bench.eval
    tracker = EvaluationTracker(output_path=None if folder is None else str(folder))
    with _without_host_probes():
        results: dict[str, Any] | None = evaluator.simple_evaluate(
            model=lm,
            # lm-eval names its folder after this value, and makes up a random name without it.
            model_args={"pretrained": bench.model_label},
            tasks=tasks.specs,
            task_manager=tasks.manager,
            num_fewshot=settings.num_fewshot,
            limit=settings.dataset_limit,
            log_samples=True,
            apply_chat_template=settings.apply_chat_template,
            fewshot_as_multiturn=settings.fewshot_as_multiturn,
            system_instruction=settings.system_instruction,
            confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
            evaluation_tracker=tracker,
            random_seed=settings.eval_seed,
            numpy_random_seed=settings.eval_seed,
            torch_random_seed=settings.eval_seed,
            fewshot_random_seed=settings.eval_seed,
        )
    if results is None:
        raise RuntimeError("lm-eval returned no results; unset LOCAL_RANK and run again")
    if folder is not None:
        save_files(folder, results, tracker)
    return results


def save_files(folder: Path, results: Mapping[str, Any], tracker: EvaluationTracker) -> list[Path]:
    """lm-eval's results and samples files are below ``folder``; returns them.

    Its tracker turns every failure to save into a log line, so the files are looked for afterwards and a
    missing one is a warning.
    """
    before = set(folder.glob("**/*"))
    samples = results["samples"]
    # Sample rows are rewritten in place as text by the tracker, so it gets copies.
    copies = {task: [dict(row) for row in rows] for task, rows in samples.items()}
    # The aggregated file comes first: it sets the time stamp that the samples files share.
    aggregated = {key: value for key, value in results.items() if key != "samples"}
    tracker.save_results_aggregated(results=aggregated, samples=copies)
    for task, rows in copies.items():
        tracker.save_results_samples(task_name=task, samples=rows)
    written = sorted(path for path in set(folder.glob("**/*")) - before if path.is_file())
    for start in ["results_", *(f"samples_{task}_" for task in samples)]:
        if not any(path.name.startswith(start) for path in written):
            logger.warning("lm-eval did not write its file %s* below %s; run.log may say why", start, folder)
    return written


@contextmanager
def _without_host_probes() -> Iterator[None]:
    """lm-eval neither runs git in the working folder nor collects facts about the host.

    Both take seconds and record what is nobody's business; the run's own ``environment.json`` holds what
    matters.
    """
    kept = evaluator.get_git_commit_hash, evaluator.add_env_info
    evaluator.get_git_commit_hash = lambda: None
    evaluator.add_env_info = lambda storage: None  # noqa: ARG005  # lm-eval's signature
    try:
        yield
    finally:
        evaluator.get_git_commit_hash, evaluator.add_env_info = kept
