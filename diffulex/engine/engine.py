"""`DiffulexEngine`: requests in, outputs out. A step is schedule, run, postprocess.

One engine lives in one process and is not thread-safe. `generate` is the offline loop over `add_request` and
`step`; servers and tests drive those themselves.
"""

from __future__ import annotations

import atexit
import importlib
import operator
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from diffulex.config import Config
from diffulex.engine.outputs import build_output, invalid_output
from diffulex.engine.request import AutoReq, MultiBlockReqTemplate
from diffulex.engine.signals import TerminationHandler
from diffulex.logger import LoggerMixin
from diffulex.sampling_params import SamplingParams
from diffulex.utils.output import GenerationOutput, RequestOutput, StepReport
from diffulex.utils.progress import GenerationProgress
from diffulex.utils.tokenizer import IncrementalDecoder, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from diffulex.engine.model_runner import MultiBlockModelRunnerTemplate
    from diffulex.engine.plan import StepPlan, StepResult
    from diffulex.engine.scheduler import MultiBlockSchedulerTemplate


class DiffulexEngine(LoggerMixin):
    """A loaded checkpoint that decodes with one strategy.

    Args:
        model: local checkpoint directory.
        **kwargs: fields of `diffulex.config.Config`; unknown ones are ignored with one warning.

    Raises:
        ConfigError: settings that are wrong or do not go together; raised before weights are loaded.
        CheckpointError: a checkpoint that cannot be read.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        self._start(Config.from_keywords(model=model, **kwargs))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """An engine with exactly the settings of `config`."""
        engine = cls.__new__(cls)
        engine._start(config)
        return engine

    def _start(self, config: Config) -> None:
        # Importing the engine's class loads no torch; making an engine does.
        from diffulex.engine.build import make_runner, make_scheduler

        self._exited = True
        importlib.import_module("diffulex.strategy")
        self.tokenizer = load_tokenizer(
            config.checkpoint, config.checkpoint.tokenizer_path, trust_remote_code=config.trust_remote_code
        )
        self.runner: MultiBlockModelRunnerTemplate = make_runner(config)
        self.config = config.resolved(num_pages=self.runner.memory_plan.num_pages)
        self.scheduler: MultiBlockSchedulerTemplate = make_scheduler(self.config)
        self._next_id = 0
        self._unreported: list[RequestOutput] = []
        self._exited = False
        atexit.register(self.exit)
        self._termination = TerminationHandler(self.exit)

    # Requests ---------------------------------------------------------------------------------------------

    def add_request(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None) -> int:
        """Queues one prompt (text or token ids) and returns its request id.

        Raises:
            ValueError: the prompt is empty, too long, holds an id outside the vocabulary, or needs more pages
                than there are. Nothing is queued then.
        """
        self._check_alive()
        if not isinstance(sampling_params, SamplingParams | None):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(sampling_params).__name__}")
        token_ids = self.encode(prompt)
        req_class = AutoReq.get(self.config.decoding_strategy)
        req = req_class(token_ids, sampling_params, self.config)
        if not isinstance(req, MultiBlockReqTemplate):
            raise TypeError(f"{type(req).__name__} is no MultiBlockReqTemplate")
        req.req_id = self._next_id
        if req.sampling_params.stop:
            req.stop_rules.attach_text(self.tokenizer, IncrementalDecoder(self.tokenizer))
        self.scheduler.add(req)
        self._next_id += 1
        return req.req_id

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; ids are checked against the vocabulary.

        Raises:
            ValueError: the prompt is neither text nor token ids, or an id is outside the vocabulary.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _plain_ids(prompt)
        limit = self.config.checkpoint.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            wrong = next(one for one in ids if not 0 <= one < limit)
            raise ValueError(f"token id {wrong} is outside the vocabulary (0 to {limit - 1})")
        return ids

    def abort_request(self, req_id: int) -> bool:
        """Ends a request now and frees its pages; the report of the next step holds its output.

        Returns:
            False when the request is not there any more.
        """
        req = self.scheduler.abort(req_id)
        if req is None:
            return False
        self._unreported.append(build_output(req, self.tokenizer))
        return True

    def is_finished(self) -> bool:
        """True when every request has ended and `step` has reported its output."""
        return self.scheduler.is_finished() and not self._unreported

    # Steps ------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """One forward pass over the batch; the report holds the outputs that ended with it.

        Requests that were aborted since the step before are among them.
        """
        self._check_alive()
        start = time.perf_counter()
        with self.runner.profiler.span("schedule"):
            plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        if not plan.spans:
            return StepReport(plan.step_id, 0, 0, 0, 0, scheduled - start, {}, self._take_unreported())
        result = self.runner.run(plan)
        ran = time.perf_counter()
        with self.runner.profiler.span("post"):
            finished = self.scheduler.postprocess(plan, result)
        end = time.perf_counter()
        if self.config.save_trace:
            self._record(plan, result, end - start)
        times = {"schedule": scheduled - start, **result.times, "post": end - ran}
        return StepReport(
            step_id=plan.step_id,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_tokens_forwarded=plan.num_rows,
            num_tokens_filled=int(result.accepted.sum()),
            step_time=end - start,
            times=times,
            finished=(*self._take_unreported(), *(build_output(req, self.tokenizer) for req in finished)),
            rows_by_kind=plan.rows_by_kind(),
        )

    def _take_unreported(self) -> tuple[RequestOutput, ...]:
        outputs, self._unreported = self._unreported, []
        return tuple(outputs)

    def _record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Adds the step to the trace of every request that took part."""
        for index, span in enumerate(plan.spans):
            rows = slice(result.row_offsets[index], result.row_offsets[index + 1])
            taken = result.accepted[rows]
            filled = zip(
                result.positions[rows][taken].tolist(),
                result.tokens[rows][taken].tolist(),
                result.confidences[rows][taken].tolist(),
                strict=True,
            )
            span.req.record(span, list(filled), (plan.step_id, seconds))

    # Offline generation -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        on_invalid: Literal["raise", "record"] = "raise",
    ) -> GenerationOutput:
        """Decodes all prompts and returns their outputs in the same order.

        Args:
            prompts: texts, or lists of token ids.
            sampling_params: one for all, or one a prompt.
            use_tqdm: show a progress bar on stderr.
            on_finish: called with index and output as soon as a prompt has ended.
            on_step: called after each engine step.
            on_invalid: a prompt that cannot be queued raises before anything runs, or becomes an output with
                ``finish_reason`` ``error``.

        Raises:
            ValueError: the numbers of prompts and parameters differ, or a prompt is invalid.
            KeyboardInterrupt: passed on after the prompts that had not ended were aborted.
        """
        start = time.perf_counter()
        params = _params_for(prompts, sampling_params)
        progress = GenerationProgress(len(prompts), enabled=use_tqdm)
        collected = _Collected(progress, on_finish)
        try:
            for index, prompt in enumerate(prompts):
                try:
                    collected.index_of[self.add_request(prompt, params[index])] = index
                except ValueError as error:
                    if on_invalid == "raise":
                        raise ValueError(f"prompt {index}: {error}") from error
                    collected.take(index, invalid_output(index, str(error)))
            with progress:
                while len(collected.outputs) < len(prompts):
                    report = self.step()
                    collected.take_all(report.finished)
                    progress.stepped(report)
                    if on_step is not None:
                        on_step(report)
        finally:
            for req_id in collected.unfinished():
                self.scheduler.abort(req_id)
            # Requests that somebody else added are reported by the next step.
            self._unreported += collected.foreign
        outputs = [collected.outputs[i] for i in range(len(prompts))]
        return GenerationOutput(outputs, time.perf_counter() - start)

    # End --------------------------------------------------------------------------------------------------

    def exit(self) -> None:
        """Frees model and cache and ends profiling; may be called more than once.

        Afterwards the engine takes no requests.
        """
        if not self._exited:
            self._exited = True
            atexit.unregister(self.exit)
            self._termination.remove()
            self.runner.exit()

    def _check_alive(self) -> None:
        if self._exited:
            raise RuntimeError("the engine has exited; make a new one to go on")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit()


class _Collected:
    """Outputs of one `generate` call; those of requests that others added are kept apart."""

    def __init__(
        self, progress: GenerationProgress, on_finish: Callable[[int, RequestOutput], None] | None
    ) -> None:
        self.outputs: dict[int, RequestOutput] = {}
        self.index_of: dict[int, int] = {}
        self.foreign: list[RequestOutput] = []
        self._progress = progress
        self._on_finish = on_finish

    def take(self, index: int, output: RequestOutput) -> None:
        """Files the output of prompt `index`."""
        output.req_id = index
        self.outputs[index] = output
        self._progress.finished(output)
        if self._on_finish is not None:
            self._on_finish(index, output)

    def take_all(self, outputs: Sequence[RequestOutput]) -> None:
        """Files all `outputs`, those that belong to this call under their prompt."""
        for output in outputs:
            if output.req_id in self.index_of:
                self.take(self.index_of[output.req_id], output)
            else:
                self.foreign.append(output)

    def unfinished(self) -> list[int]:
        """Ids of queued requests without an output."""
        return [req_id for req_id, index in self.index_of.items() if index not in self.outputs]


def _plain_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain integers; anything that is no whole number is refused."""
    try:
        if any(isinstance(one, bool) for one in prompt):
            raise TypeError("bool")
        return [operator.index(one) for one in prompt]
    except TypeError:
        raise ValueError(f"a prompt must be text or a list of token ids, not {prompt!r}") from None


def _params_for(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of strings or of token id lists, not one string")
    if params is None or isinstance(params, SamplingParams):
        return [params if params is not None else SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ValueError("sampling_params must be SamplingParams, or a list with one for each prompt")
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts came with {len(params)} sampling_params; give one for each")
    return list(params)
