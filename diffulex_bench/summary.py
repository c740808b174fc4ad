"""The table at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from diffulex_bench.metrics import CostSummary
    from diffulex_bench.report import RunReport, Score, TaskReport


def print_summary(report: RunReport, folder: Path, *, saved: bool, console: Console) -> None:
    """Task, strategy, scores with intervals, TPF, TPS, NFE, stop reasons, and where the files are."""
    table = Table(title=f"{report.model_name} · {report.model}", title_justify="left", title_style="bold")
    for heading in ("task", "strategy", "samples", "score"):
        table.add_column(heading)
    for heading in ("TPF", "TPS", "NFE/sample"):
        table.add_column(heading, justify="right")
    table.add_column("stopped by")
    for name, task in report.tasks.items():
        costs = task.costs
        table.add_row(
            name,
            report.strategy,
            _samples_text(task),
            _scores_text(task.scores),
            f"{costs.tpf:.2f}",
            f"{costs.tps:,.0f}",
            f"{costs.nfe_per_sample:.1f}",
            "\n".join(f"{reason} {count}" for reason, count in costs.stop_reasons.items()),
        )
    console.print(table)
    for line in _remarks(report):
        console.print(Text(line))
    console.print(Text(f"files: {folder}" if saved else f"log: {folder / 'run.log'}"), soft_wrap=True)


def _samples_text(task: TaskReport) -> str:
    if task.num_finished == task.num_expected:
        return str(task.num_finished)
    return f"{task.num_finished} of {task.num_expected}"


def _scores_text(scores: dict[str, Score]) -> str:
    return "\n".join(f"{name} {_score_text(score)}" for name, score in scores.items()) or "not scored"


def _score_text(score: Score) -> str:
    if score.interval is None:
        return f"{score.value:.4g}"
    low, high = score.interval.low, score.interval.high
    return f"{100 * score.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _remarks(report: RunReport) -> list[str]:
    total: CostSummary = report.total
    nfe = ", ".join(f"{kind} {count:,}" for kind, count in total.nfe.items() if kind != "total" and count)
    passes = f"{total.nfe.get('total', 0):,} forward passes" + (f" ({nfe})" if nfe else "")
    lines = [
        f"{total.tokens_output:,} tokens in {total.wall_time:.1f} s; {passes}; "
        f"TPF of the decoding passes alone {total.tpf_decode:.2f}"
    ]
    time = report.time
    if time.total:
        lines.append(
            f"time in the engine {time.total:.1f} s: prefill {time.prefill:.1f}, decode {time.decode:.1f}, "
            f"rebuild {time.rebuild:.1f}, other {time.other:.1f}; {total.tokens_forwarded:,} rows computed, "
            f"{total.tokens_recomputed:,} of them again"
        )
    odd = {
        "empty answers": total.num_empty,
        "answers cut by a limit": total.num_truncated,
        "prompts too long": total.num_prompts_too_long,
        "failed samples": total.num_errors,
    }
    listed = ", ".join(f"{name} {count}" for name, count in odd.items() if count)
    if listed:
        lines.append(listed)
    if report.status == "partial":
        lines.append(f"partial results: {report.reason}")
    return lines
