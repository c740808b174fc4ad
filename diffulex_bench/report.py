"""The typed contents of ``results.json`` and how they are computed from records and lm-eval's results."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from diffulex_bench.metrics import DEFINITIONS, CostSummary, Interval, mean_interval, summarise_costs
from diffulex_bench.step_times import TIME_DEFINITIONS, TimeSplit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex_bench.generation import GenerationPlan
    from diffulex_bench.records import SampleRecord

SCHEMA_VERSION = 1
Status = Literal["complete", "partial"]


@dataclass(frozen=True)
class Score:
    """One score of a task.

    Attributes:
        value: lm-eval's aggregated value; of a partial run, the mean over the samples that were graded.
        interval: 95 % interval of that value, None where values per sample are not numbers.
        num_samples: documents the value stands for.
    """

    value: float
    interval: Interval | None
    num_samples: int


@dataclass(frozen=True)
class TaskReport:
    """One task of a run.

    Attributes:
        num_expected: samples the run was asked for, repeats included.
        num_finished: samples that were answered.
        num_documents: documents of the task's split before any limit.
        accuracy: the headline score, None when nothing was scored.
        scores: score name -> score, the headline first.
        costs: what the answers cost.
        generation: argument -> ``{"value", "origin"}``; the origin is ``eval``, ``task`` or ``default``.
        stops: stop strings of the task.
    """

    num_expected: int
    num_finished: int
    num_documents: int
    accuracy: Score | None
    scores: dict[str, Score]
    costs: CostSummary
    generation: dict[str, dict[str, Any]]
    stops: tuple[str, ...]


@dataclass(frozen=True)
class RunReport:
    """Everything ``results.json`` holds.

    Attributes:
        status: ``partial`` when the run was interrupted or failed before all was scored.
        reason: why it is partial.
        strategy: decoding strategy.
        model: checkpoint folder or bundled name.
        total: costs over all tasks.
        time: seconds of all engine steps by purpose and by part.
        definitions: what each number means.
    """

    status: Status
    reason: str | None
    model: str
    model_name: str
    strategy: str
    tasks: dict[str, TaskReport]
    total: CostSummary
    time: TimeSplit = field(default_factory=TimeSplit)
    definitions: dict[str, str] = field(default_factory=lambda: DEFINITIONS | TIME_DEFINITIONS)
    schema_version: int = SCHEMA_VERSION

    def as_json(self) -> str:
        """The report as indented JSON with a final line end."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What the report needs to know of a task beside its samples."""

    num_expected: int
    num_documents: int
    plan: GenerationPlan


def build_task_report(
    facts: TaskFacts, records: Sequence[SampleRecord], results: Mapping[str, Any] | None, rows: Sequence[Any]
) -> TaskReport:
    """The report of one task.

    ``results`` and ``rows`` are lm-eval's ``results[task]`` and ``samples[task]``; without them the scores
    come from the records' own grades.
    """
    scores = _graded_scores(records) if results is None else _evaluated_scores(results, rows)
    plan = facts.plan
    return TaskReport(
        num_expected=facts.num_expected,
        num_finished=len(records),
        num_documents=facts.num_documents,
        accuracy=next(iter(scores.values()), None),
        scores=scores,
        costs=summarise_costs(records),
        generation={
            name: {"value": value, "origin": plan.origins[name]} for name, value in plan.values.items()
        },
        stops=plan.stops,
    )


def scores_by_document(rows: Sequence[Any]) -> dict[int, dict[str, float]]:
    """Document -> score name -> value from lm-eval's sample rows; what is no number is left out."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        for metric in row["metrics"]:
            value = row[metric]
            if isinstance(value, bool | int | float):
                found.setdefault(row["doc_id"], {})[_score_name(metric, row["filter"])] = float(value)
    return found


def _score_name(metric: str, pipeline: str) -> str:
    return metric if pipeline == "none" else f"{metric},{pipeline}"


def _graded_scores(records: Sequence[SampleRecord]) -> dict[str, Score]:
    names = dict.fromkeys(name for record in records for name in record.scores)
    return {
        name: _score([record.scores[name] for record in records if name in record.scores]) for name in names
    }


def _evaluated_scores(results: Mapping[str, Any], rows: Sequence[Any]) -> dict[str, Score]:
    by_document = scores_by_document(rows)
    scores = {}
    for key, value in results.items():
        metric, comma, pipeline = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = _score_name(metric, pipeline)
        values = [found[name] for found in by_document.values() if name in found]
        own = _score(values) if values else None
        # An aggregation other than the mean has no interval that could be computed from values per document.
        is_mean = own is not None and abs(own.value - value) < 1e-9
        num = len(values) or int(results.get("sample_len", 0))
        scores[name] = Score(float(value), own.interval if own and is_mean else None, num)
    return scores


def _score(values: Sequence[float]) -> Score:
    return Score(fmean(values), mean_interval(values), len(values))
