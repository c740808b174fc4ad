"""One record a sample: everything the report, a later comparison or a resume needs, and nothing else.

Made by the lm-eval adapter when a request finishes, appended to ``samples_<task>.jsonl`` at once, read back
by the report.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from diffulex_bench.errors import BenchError

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.utils.output import RequestOutput, StepRecord


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One answer to one document.

    Attributes:
        task: lm-eval task name.
        doc_id: position of the document in the task's split.
        repeat: 0 for the first answer to the document.
        prompt: the exact text that was tokenised, after any cut from the left.
        prompt_sha256: hash of the exact text that the task asked for.
        prompt_too_long: the prompt did not fit the window.
        target: expected answer as text, None where scoring is not ours.
        output: visible answer, which is what was scored.
        thinking: text of a thinking part that was taken off, None without one.
        output_token_ids: tokens of the answer before the first stop.
        extracted: what was read from the answer, None when nothing was found.
        extraction_method: how it was found; None where scoring is not ours.
        scores: score name -> value; filled at once by our own graders, by lm-eval for other tasks.
        empty: the visible answer is blank.
        truncated: a limit ended the answer.
        num_prompt_tokens: prompt length in tokens.
        num_cached_tokens: prompt tokens that the prefix cache served.
        num_prompt_tokens_cut: prompt tokens dropped from the left.
        tokens_output: length of `output_token_ids`.
        tokens_decoded: positions filled in all.
        unfilled: positions still masked when a limit ended the answer.
        nfe: forward passes by kind, with ``total``.
        tpf: tokens_output / nfe["total"].
        tpf_decode: tokens_decoded / (denoise + store).
        stop_reason: the engine's reason.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        error: message of a request that failed.
        num_preemptions: how often the request lost its pages.
        num_forward_tokens: rows computed for the request.
        seed: seed of the request's own generator.
        time: seconds from arrival to finish.
        arrival_time: seconds since the run began to generate.
        first_token_time: seconds since then until the first token, None when there was none.
        finish_time: seconds since then until the end.
    """

    task: str
    doc_id: int
    repeat: int
    prompt: str
    prompt_sha256: str
    prompt_too_long: bool
    target: str | None
    output: str
    thinking: str | None
    output_token_ids: list[int]
    extracted: str | None
    extraction_method: str | None
    scores: dict[str, float]
    empty: bool
    truncated: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_prompt_tokens_cut: int
    tokens_output: int
    tokens_decoded: int
    unfilled: int
    nfe: dict[str, int]
    tpf: float
    tpf_decode: float
    stop_reason: str
    finish_reason: str
    error: str | None
    num_preemptions: int
    num_forward_tokens: int
    seed: int
    time: float
    arrival_time: float
    first_token_time: float | None
    finish_time: float

    @property
    def key(self) -> tuple[str, int, int]:
        """What identifies the sample in a run."""
        return self.task, self.doc_id, self.repeat

    def as_json(self) -> str:
        """The record as one line of JSON, without the line end."""
        return json.dumps(asdict(self), ensure_ascii=False)


def costs_of(output: RequestOutput, clock_zero: float) -> dict[str, Any]:
    """The fields of a `SampleRecord` that the engine measured; times count from ``clock_zero``."""
    first = output.first_token_time
    return {
        "output_token_ids": list(output.token_ids),
        "truncated": output.is_truncated,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "tokens_output": output.num_output_tokens,
        "tokens_decoded": output.num_decoded_tokens,
        "unfilled": output.num_unfilled,
        "nfe": output.nfe.as_dict(),
        "tpf": output.tpf,
        "tpf_decode": output.tpf_decode,
        "stop_reason": output.completion_reason,
        "finish_reason": output.finish_reason,
        "error": output.error,
        "num_preemptions": output.num_preemptions,
        "num_forward_tokens": output.num_forward_tokens,
        "time": output.finish_time - output.arrival_time,
        "arrival_time": output.arrival_time - clock_zero,
        "first_token_time": None if first is None else first - clock_zero,
        "finish_time": output.finish_time - clock_zero,
    }


def sha256_of(text: str) -> str:
    """Hexadecimal SHA-256 of the UTF-8 bytes of ``text``."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def sample_seed(base_seed: int, task: str, doc_id: int, repeat: int) -> int:
    """Seed of one sample, in ``[0, 2**31)``: depends on nothing but its four arguments.

    The draws of a sample therefore stay the same in any batch, order, subset or resumed run.
    """
    digest = hashlib.sha256(f"{base_seed}\x1f{task}\x1f{doc_id}\x1f{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def compact_trace(steps: list[StepRecord]) -> list[list[Any]]:
    """One row a forward pass: step, kind, seconds, start, end, ``[[position, token, confidence], ...]``."""
    return [
        [
            step.step_id,
            step.kind,
            round(step.step_time, 6),
            step.start,
            step.end,
            [[position, token, round(confidence, 4)] for position, token, confidence in step.filled],
        ]
        for step in steps
    ]


def read_records(path: Path) -> list[SampleRecord]:
    """The records of a samples file, in file order; a last line that was cut off by a crash is left out.

    Raises:
        BenchError: a line that is not the last one cannot be read.
    """
    names = [field.name for field in fields(SampleRecord)]
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise BenchError(f"{path}, line {number} is no JSON ({error}); remove the line") from error
        records.append(SampleRecord(**{name: row[name] for name in names}))
    return records
