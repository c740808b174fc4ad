"""Numbers of a report, as pure functions over sample records; each formula stands in its docstring.

Times are seconds of one monotonic clock, lengths are tokens, costs are forward passes (NFE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from diffulex_bench.records import SampleRecord

#: Two-sided 95 % quantile of the standard normal distribution.
Z_95 = 1.959963984540054

NFE_KINDS = ("prefill", "denoise", "store", "rebuild")

#: Printed into every report, so that its numbers can be read without this file.
DEFINITIONS: dict[str, str] = {
    "accuracy": "mean score over finished samples; interval: 95 % Wilson interval of a proportion",
    "tokens_output": "tokens of the answers before the first stop (end of sequence, stop string or limit)",
    "tokens_decoded": "positions that went from mask to token, those behind a stop included",
    "nfe": "forward passes a request took part in, by kind: prefill, denoise, store (finished block written "
    "without denoising), rebuild (state restored after preemption)",
    "tokens_forwarded": "rows computed in all forward passes of the samples",
    "tokens_recomputed": "tokens_forwarded less one row for every prompt token that no cache served and for "
    "every decoded token: rows computed again, above all positions that stay masked pass after pass",
    "forwarded_per_token": "tokens_forwarded / tokens_output",
    "tpf": "mean over samples of tokens_output / all forward passes of the sample",
    "tpf_decode": "mean of tokens_decoded / (denoise + store passes) over samples with such a pass",
    "aggregate_tpf": "all tokens_output / all forward passes of all samples",
    "tps": "all tokens_output / seconds from the first arrival to the last finish",
    "ttft": "mean seconds from arrival to the end of the pass that filled the first token, queueing included",
    "tpot": "mean of (finish - first token) / (tokens_output - 1) over samples with two tokens or more, "
    "in seconds",
    "empty": "samples whose visible answer is empty after stripping white space",
    "truncated": "samples that a limit ended, not a stop",
    "unfilled": "positions still masked when a limit ended a sample; they are dropped",
    "prompts_too_long": "samples whose prompt exceeded the window; refused or cut as overlong_prompt says",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval ``[low, high]`` and the method that made it."""

    low: float
    high: float
    method: str = "wilson95"


@dataclass(frozen=True, slots=True)
class CostSummary:
    """What a set of samples cost; every field is defined in `DEFINITIONS`."""

    num_samples: int = 0
    tokens_output: int = 0
    tokens_decoded: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_forwarded: int = 0
    tokens_recomputed: int = 0
    forwarded_per_token: float = 0.0
    nfe: dict[str, int] = field(default_factory=dict)
    nfe_per_sample: float = 0.0
    tpf: float = 0.0
    tpf_decode: float = 0.0
    aggregate_tpf: float = 0.0
    tps: float = 0.0
    wall_time: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    stop_reasons: dict[str, int] = field(default_factory=dict)
    num_empty: int = 0
    num_truncated: int = 0
    num_unfilled: int = 0
    num_errors: int = 0
    num_prompts_too_long: int = 0
    num_preemptions: int = 0


def wilson_interval(num_correct: float, num_samples: int, z: float = Z_95) -> Interval:
    """Wilson score interval of a proportion.

    With ``p = num_correct / n``: centre ``(p + z^2 / 2n) / (1 + z^2 / n)``, half width
    ``z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)``. Without samples nothing is known: ``[0, 1]``.

    Raises:
        ValueError: ``num_correct`` is outside ``[0, num_samples]``.
    """
    if not 0 <= num_correct <= max(num_samples, 0):
        raise ValueError(f"num_correct ({num_correct}) must lie in [0, num_samples={num_samples}]")
    if num_samples == 0:
        return Interval(0.0, 1.0)
    p, square = num_correct / num_samples, z * z / num_samples
    centre = (p + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(p * (1 - p) / num_samples + square / (4 * num_samples))
    low = 0.0 if num_correct == 0 else max(0.0, centre - half)
    high = 1.0 if num_correct == num_samples else min(1.0, centre + half)
    return Interval(low, high)


def mean_interval(values: Sequence[float], z: float = Z_95) -> Interval:
    """Interval of a mean: Wilson for scores of 0 and 1, else ``mean +- z * sd / sqrt(n)`` (``normal95``)."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(sum(values), len(values), z)
    mean = fmean(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))
    half = z * spread / math.sqrt(len(values))
    return Interval(mean - half, mean + half, "normal95")


def summarise_costs(records: Sequence[SampleRecord]) -> CostSummary:
    """Totals and means over ``records`` by the formulas of `DEFINITIONS`; zeros when there are none."""
    if not records:
        return CostSummary(nfe=dict.fromkeys((*NFE_KINDS, "total"), 0))
    nfe = {kind: sum(record.nfe[kind] for record in records) for kind in NFE_KINDS}
    nfe["total"] = sum(nfe.values())
    tokens = sum(record.tokens_output for record in records)
    forwarded = sum(record.num_forward_tokens for record in records)
    wall = max(record.finish_time for record in records) - min(record.arrival_time for record in records)
    decoding = [record for record in records if record.nfe["denoise"] + record.nfe["store"] > 0]
    return CostSummary(
        num_samples=len(records),
        tokens_output=tokens,
        tokens_decoded=sum(record.tokens_decoded for record in records),
        tokens_prompt=sum(record.num_prompt_tokens for record in records),
        tokens_cached=sum(record.num_cached_tokens for record in records),
        tokens_forwarded=forwarded,
        tokens_recomputed=sum(_num_recomputed(record) for record in records),
        forwarded_per_token=forwarded / tokens if tokens else 0.0,
        nfe=nfe,
        nfe_per_sample=nfe["total"] / len(records),
        tpf=fmean(record.tpf for record in records),
        tpf_decode=fmean(record.tpf_decode for record in decoding) if decoding else 0.0,
        aggregate_tpf=tokens / nfe["total"] if nfe["total"] else 0.0,
        tps=tokens / wall if wall > 0 else 0.0,
        wall_time=wall,
        ttft=_mean_or_none(
            record.first_token_time - record.arrival_time
            for record in records
            if record.first_token_time is not None
        ),
        tpot=_mean_or_none(
            (record.finish_time - record.first_token_time) / (record.tokens_output - 1)
            for record in records
            if record.first_token_time is not None and record.tokens_output > 1
        ),
        stop_reasons=count_stop_reasons(records),
        num_empty=sum(record.empty for record in records),
        num_truncated=sum(record.truncated for record in records),
        num_unfilled=sum(record.unfilled for record in records),
        num_errors=sum(record.error is not None for record in records),
        num_prompts_too_long=sum(record.prompt_too_long for record in records),
        num_preemptions=sum(record.num_preemptions for record in records),
    )


def count_stop_reasons(records: Sequence[SampleRecord]) -> dict[str, int]:
    """How many samples ended for which reason, the most frequent first."""
    reasons = [record.stop_reason for record in records]
    return {
        reason: reasons.count(reason) for reason in sorted(set(reasons), key=lambda r: (-reasons.count(r), r))
    }


def _num_recomputed(record: SampleRecord) -> int:
    needed = record.num_prompt_tokens - record.num_cached_tokens + record.tokens_decoded
    return max(record.num_forward_tokens - needed, 0)


def _mean_or_none(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None
