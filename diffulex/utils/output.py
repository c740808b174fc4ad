"""What the engine gives back: one `RequestOutput` a prompt, `StepRecord` for traces, totals over a run.

Made by the engine when a request ends; read by the bench, the server and users. Times are seconds of one
monotonic clock, lengths are tokens, costs are forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Engine reason -> the coarse reason that OpenAI-style clients know.
FINISH_REASON_OF = {
    "eos_token_generated": "stop",
    "stop_token": "stop",
    "stop_string": "stop",
    "max_new_tokens_reached": "length",
    "max_model_len_reached": "length",
    "max_nfe_reached": "length",
    "max_repetition_run_reached": "length",
    "stalled": "length",
    "aborted": "abort",
    "error": "error",
}


@dataclass(slots=True)
class NfeCounts:
    """Forward passes of one request by kind; a pass that denoises counts as `denoise` whatever else it does.

    Attributes:
        prefill: passes that only stored prompt KV.
        denoise: passes in which at least one open block was sampled.
        store: passes that only stored a finished block.
        rebuild: passes that only restored KV lost to preemption.
    """

    prefill: int = 0
    denoise: int = 0
    store: int = 0
    rebuild: int = 0

    @property
    def total(self) -> int:
        """All forward passes the request took part in."""
        return self.prefill + self.denoise + self.store + self.rebuild

    def as_dict(self) -> dict[str, int]:
        """The counts by name, and their sum under ``total``."""
        return {
            "prefill": self.prefill,
            "denoise": self.denoise,
            "store": self.store,
            "rebuild": self.rebuild,
            "total": self.total,
        }


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """State of one block of the window after a step."""

    block_id: int
    status: str
    num_mask_tokens: int
    progress: float

    @property
    def is_active(self) -> bool:
        """True while the block is being denoised."""
        return self.status == "ACTIVE"

    @property
    def is_dummy(self) -> bool:
        """True for an allocated block that has not been opened."""
        return self.status == "DUMMY"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass as one request saw it; kept only with ``save_trace``.

    Attributes:
        step_id: number of the engine step.
        kind: ``prefill``, ``denoise``, ``store`` or ``rebuild``.
        step_time: seconds of the whole engine step.
        start: first position that was forwarded.
        end: one past the last position that was forwarded.
        filled: ``(position, token id, confidence)`` of each position written in this step.
        window_start: first position of the window after the step.
        running_token_ids: window after the step; the mask id stands at open positions.
        block_trace: the blocks of that window.
    """

    step_id: int
    kind: str
    step_time: float
    start: int
    end: int
    filled: tuple[tuple[int, int, float], ...]
    window_start: int
    running_token_ids: tuple[int, ...]
    block_trace: tuple[BlockTrace, ...]

    @property
    def is_prefill(self) -> bool:
        """True when the pass only stored prompt KV."""
        return self.kind == "prefill"

    @property
    def num_generated_tokens(self) -> int:
        """Positions that went from mask to token in this step."""
        return len(self.filled)


@dataclass(slots=True)
class RequestOutput:
    """Result of one request.

    Attributes:
        req_id: index of the prompt in `generate`, or the id that `add_request` returned.
        token_ids: answer before the first stop; never a mask id, never the prompt.
        full_token_ids: every position filled without a gap, the stop and what follows it included.
        text: decoded answer, cut at the first stop string.
        full_text: decoded `full_token_ids`, special tokens shown.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        completion_reason: the engine's own reason, a key of `FINISH_REASON_OF`.
        error: message when `finish_reason` is ``error``.
        num_prompt_tokens: prompt length.
        num_cached_tokens: prompt tokens served by prefix caching at first admission.
        num_decoded_tokens: positions filled in all, those behind a stop included.
        num_unfilled: positions still masked when a hard limit ended the request; they are dropped.
        num_preemptions: how often the request lost its pages.
        num_forward_tokens: rows computed for the request over all passes.
        nfe: forward passes by kind.
        arrival_time: when the request was added.
        first_token_time: end of the step that filled the first position, None if none was filled.
        finish_time: when the request ended.
        trajectory: step records; empty without ``save_trace``.
    """

    req_id: int
    token_ids: list[int]
    full_token_ids: list[int]
    text: str
    full_text: str
    completion_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_decoded_tokens: int
    num_unfilled: int
    num_preemptions: int
    num_forward_tokens: int
    nfe: NfeCounts
    arrival_time: float
    first_token_time: float | None
    finish_time: float
    error: str | None = None
    trajectory: list[StepRecord] = field(default_factory=list)

    @property
    def finish_reason(self) -> str:
        """Coarse reason: ``stop``, ``length``, ``abort`` or ``error``."""
        return FINISH_REASON_OF[self.completion_reason]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer before the first stop."""
        return len(self.token_ids)

    @property
    def tpf(self) -> float:
        """Tokens of the answer per forward pass of any kind; 0.0 without a pass."""
        return self.num_output_tokens / self.nfe.total if self.nfe.total else 0.0

    @property
    def tpf_decode(self) -> float:
        """Positions filled per non-prefill pass, as other papers count; 0.0 without such a pass."""
        passes = self.nfe.denoise + self.nfe.store
        return self.num_decoded_tokens / passes if passes else 0.0

    @property
    def is_truncated(self) -> bool:
        """True when a limit, and not a stop, ended the answer."""
        return self.finish_reason == "length"

    @property
    def eos_token_generated(self) -> bool:
        """True when an end-of-sequence token ended the answer."""
        return self.completion_reason == "eos_token_generated"

    @property
    def max_new_tokens_reached(self) -> bool:
        """True when ``max_tokens`` ended the answer."""
        return self.completion_reason == "max_new_tokens_reached"

    @property
    def max_model_len_reached(self) -> bool:
        """True when ``max_model_len`` ended the answer."""
        return self.completion_reason == "max_model_len_reached"

    @property
    def max_nfe_reached(self) -> bool:
        """True when ``max_nfe`` ended the answer."""
        return self.completion_reason == "max_nfe_reached"

    @property
    def max_repetition_run_reached(self) -> bool:
        """True when ``max_repetition_run`` ended the answer."""
        return self.completion_reason == "max_repetition_run_reached"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one engine step did; returned by `DiffulexEngine.step`.

    Attributes:
        step_id: number of the step, from 0.
        num_running: requests in the batch after the step.
        num_waiting: requests still queued after the step.
        num_tokens_forwarded: rows of the forward pass.
        num_tokens_filled: positions that became tokens.
        step_time: seconds.
        times: seconds by part: ``schedule``, ``prepare``, ``forward``, ``sample``, ``post``.
        finished: outputs of the requests that ended in this step.
        rows_by_kind: rows of the forward pass by why they ran: ``prefill`` (the prompt's head), ``denoise``,
            ``store``, ``rebuild``.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_tokens_forwarded: int
    num_tokens_filled: int
    step_time: float
    times: dict[str, float]
    finished: tuple[RequestOutput, ...]
    rows_by_kind: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class GenerationOutput:
    """What `generate` returns: outputs in prompt order and the wall time of the call in seconds."""

    trajectories: list[RequestOutput]
    wall_time: float

    def __len__(self) -> int:
        return len(self.trajectories)

    def stats(self) -> dict[str, Any]:
        """Totals over the call; see `aggregate`."""
        return aggregate(self.trajectories)


def aggregate(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Totals over finished requests.

    ``tpf`` is the mean of the requests' own `tpf`; ``aggregate_tpf`` is all answer tokens over all passes.
    ``tps`` is all answer tokens over the wall time from the first arrival to the last finish. ``ttft`` and
    ``tpot`` are means in seconds over requests with at least one, respectively two, answer tokens.
    """
    num_tokens = sum(output.num_output_tokens for output in outputs)
    num_passes = sum(output.nfe.total for output in outputs)
    span = 0.0
    if outputs:
        span = max(output.finish_time for output in outputs) - min(output.arrival_time for output in outputs)
    ttft = [o.first_token_time - o.arrival_time for o in outputs if o.first_token_time is not None]
    tpot = [
        (o.finish_time - o.first_token_time) / (o.num_output_tokens - 1)
        for o in outputs
        if o.first_token_time is not None and o.num_output_tokens > 1
    ]
    reasons: dict[str, int] = {}
    for output in outputs:
        reasons[output.completion_reason] = reasons.get(output.completion_reason, 0) + 1
    kinds = ("prefill", "denoise", "store", "rebuild", "total")
    return {
        "num_requests": len(outputs),
        "tokens_output": num_tokens,
        "tokens_decoded": sum(output.num_decoded_tokens for output in outputs),
        "nfe": {kind: sum(output.nfe.as_dict()[kind] for output in outputs) for kind in kinds},
        "tpf": _mean([output.tpf for output in outputs]),
        "aggregate_tpf": num_tokens / num_passes if num_passes else 0.0,
        "tpf_decode": _mean([output.tpf_decode for output in outputs]),
        "wall_time": span,
        "tps": num_tokens / span if span > 0 else 0.0,
        "ttft": _mean(ttft),
        "tpot": _mean(tpot),
        "completion_reasons": reasons,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
