"""The lm-eval model of this project: requests in, texts out, one record a finished request on the way.

lm-eval calls `generate_until` with every request of an evaluation at once; the engine batches them. Made by
`diffulex_bench.runner` around an engine, or by lm-eval itself from ``--model diffulex --model_args ...``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from diffulex.logger import get_logger
from diffulex_bench.config import BenchConfig
from diffulex_bench.errors import BenchError
from diffulex_bench.generation import cut_at_stops, plan_generation, split_thinking
from diffulex_bench.jobs import Job
from diffulex_bench.prompts import PromptBuilder
from diffulex_bench.records import SampleRecord, compact_trace, costs_of, sample_seed, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lm_eval.api.instance import Instance

    from diffulex.config import Config
    from diffulex.sampling_params import SamplingParams
    from diffulex.utils.output import GenerationOutput, RequestOutput, StepReport
    from diffulex_bench.generation import GenerationPlan
    from diffulex_bench.prompts import BenchTokenizer
    from diffulex_bench.scoring import Grade

logger = get_logger(__name__)

REFUSAL = (
    "diffulex does not answer log-likelihood requests: a diffusion language model has no exact left-to-right "
    "likelihood and no estimator is available yet in this version; choose a generate_until task"
)


class Engine(Protocol):
    """The part of `DiffulexEngine` that the adapter uses."""

    config: Config

    @property
    def tokenizer(self) -> BenchTokenizer:
        """The tokenizer of the model."""
        ...

    def generate(
        self,
        prompts: list[list[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        on_finish: Callable[[int, RequestOutput], None] | None,
        on_step: Callable[[StepReport], None] | None,
        on_invalid: Literal["record"],
    ) -> GenerationOutput:
        """Outputs in prompt order."""
        ...

    def exit(self) -> None:
        """Frees the engine."""
        ...


class Listener(Protocol):
    """Who wants to know how a run goes on; the run folder and the progress bar."""

    def on_start(self, task: str, num_requests: int) -> None:
        """Requests of one task are about to run."""
        ...

    def on_sample(self, record: SampleRecord, trace: list[list[Any]]) -> None:
        """One request has finished."""
        ...

    def on_step(self, report: StepReport) -> None:
        """One forward pass has run."""
        ...


@register_model("diffulex")
class DiffulexLM(LM):  # type: ignore[misc]  # lm-eval ships no types
    """Answers ``generate_until`` requests with a diffusion language model.

    One process: rank 0 of 1, whatever a surrounding launcher says; workers belong to the engine. Results do
    not depend on how requests are batched: every sample has its own seed, see `sample_seed`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        engine: Engine | None = None,
        bench: BenchConfig | None = None,
        graders: Mapping[str, Callable[[Mapping[str, Any], str], Grade] | None] | None = None,
        listeners: Sequence[Listener] = (),
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """Wraps ``engine``, or builds one for the checkpoint folder ``pretrained``.

        ``settings`` are fields of the ``engine`` and ``eval`` sections. ``batch_size`` as a number is
        ``max_num_reqs`` unless that is given; ``max_batch_size`` has no meaning here, since the engine
        batches by tokens.

        Raises:
            BenchError: an unknown setting, or neither an engine nor a folder.
            ConfigError: settings the engine refuses.
        """
        super().__init__()
        self.bench = bench or bench_from_model_args(pretrained, settings, batch_size, device)
        if max_batch_size is not None:
            logger.info("max_batch_size=%s has no effect; the engine fills batches by tokens", max_batch_size)
        self.engine = engine or build_engine(self.bench.engine_config)
        self.listeners = tuple(listeners)
        self.graders = dict(graders or {})
        self.records: list[SampleRecord] = []
        self._prompts = PromptBuilder(
            self.engine.tokenizer,
            add_bos_token=self.bench.eval.add_bos_token,
            overlong=self.bench.eval.overlong_prompt,
            window=self.engine.config.max_model_len,
        )
        self._clock_zero: float | None = None
        self._told: set[tuple[str, ...]] = set()

    # Generation ------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Visible answers in request order; each finished request is recorded and cached at once."""
        texts: list[str] = [""] * len(requests)
        repeats: dict[int, int] = defaultdict(int)
        by_task: dict[str, list[Job]] = defaultdict(list)
        for index, request in enumerate(requests):
            job = self._job(index, request, repeats[id(request)])
            repeats[id(request)] += 1
            by_task[job.task].append(job)
        for task, jobs in by_task.items():
            self._run_task(task, jobs, texts)
        return texts

    def _job(self, index: int, request: Instance, repeat: int) -> Job:
        context, task_kwargs = request.args
        task = request.task_name or "request"
        plan = plan_generation(self.bench.eval, self.bench.explicit_eval, task_kwargs, f"task {task}")
        self._tell_ignored(task, plan)
        prompt = self._prompts.build(context, plan.values["max_tokens"])
        doc_id = index if request.doc_id is None else request.doc_id
        seed = sample_seed(self.bench.eval.eval_seed, task, doc_id, repeat)
        return Job(index, request, task, doc_id, repeat, plan, prompt, seed)

    def _tell_ignored(self, task: str, plan: GenerationPlan) -> None:
        notice = (task, *plan.ignored)
        if plan.ignored and notice not in self._told:
            self._told.add(notice)
            logger.warning(
                "task %s asks for %s, which this engine does not have", task, ", ".join(plan.ignored)
            )

    def _run_task(self, task: str, jobs: list[Job], texts: list[str]) -> None:
        if self._clock_zero is None:
            self._clock_zero = time.perf_counter()
        for listener in self.listeners:
            listener.on_start(task, len(jobs))
        params = [job.sampling_params(self._prompts) for job in jobs]
        for job in jobs:
            if job.prompt.error is not None:
                texts[job.index] = self._finish(job, job.refused())

        runnable = [position for position, job in enumerate(jobs) if job.prompt.error is None]

        def on_finish(position: int, output: RequestOutput) -> None:
            job = jobs[runnable[position]]
            texts[job.index] = self._finish(job, output)

        def on_step(report: StepReport) -> None:
            for listener in self.listeners:
                listener.on_step(report)

        if runnable:
            self.engine.generate(
                [jobs[position].prompt.token_ids for position in runnable],
                [params[position] for position in runnable],
                on_finish=on_finish,
                on_step=on_step,
                on_invalid="record",
            )

    def _finish(self, job: Job, output: RequestOutput) -> str:
        thinking, text = split_thinking(output.text, opened=job.opens_thinking)
        text = cut_at_stops(text, job.plan.stops)
        grader = self.graders.get(job.task)
        grade = grader(job.request.doc, text) if grader else None
        record = SampleRecord(
            task=job.task,
            doc_id=job.doc_id,
            repeat=job.repeat,
            prompt=job.prompt.text,
            prompt_sha256=sha256_of(job.request.args[0]),
            prompt_too_long=job.prompt.too_long,
            target=grade.target if grade else None,
            output=text,
            thinking=thinking,
            extracted=grade.extracted if grade else None,
            extraction_method=grade.method if grade else None,
            scores=dict(grade.scores) if grade else {},
            empty=not text.strip(),
            num_prompt_tokens_cut=job.prompt.num_cut,
            seed=job.seed,
            **costs_of(output, self._clock_zero or 0.0),
        )
        self.records.append(record)
        for listener in self.listeners:
            listener.on_sample(record, compact_trace(output.trajectory))
        if output.error is None:
            self.cache_hook.add_partial("generate_until", job.request.args, text)
        return text

    # Refused ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Always refused: a made-up number would become a score."""
        raise NotImplementedError(REFUSAL)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Always refused, see `loglikelihood`."""
        raise NotImplementedError(REFUSAL)

    # Chat ------------------------------------------------------------------------------------------------

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as one prompt; without generation prompt the last message is continued."""
        if add_generation_prompt:
            return self.engine.tokenizer.apply_chat_template(chat_history)
        opened = self.engine.tokenizer.apply_chat_template(chat_history[:-1])
        return opened + chat_history[-1]["content"]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Text of the tokenizer's template for lm-eval's record; empty when none is asked for."""
        if isinstance(chat_template, str):
            raise BenchError(
                f"named chat templates are not supported ({chat_template!r}); set apply_chat_template to "
                "true to use the tokenizer's own"
            )
        return (self.engine.tokenizer.chat_template or "") if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """Path of the tokenizer in a form that can be part of a file name."""
        config = self.engine.config
        return str(config.tokenizer_path or config.model).strip("/").replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its own results: the engine's resolved settings."""
        return {"diffulex_engine": {name: str(value) for name, value in self.engine.config.as_dict().items()}}


def build_engine(config: Config) -> Engine:
    """A loaded engine with exactly the resolved settings of ``config``."""
    from diffulex import Diffulex

    engine: Engine = Diffulex.from_config(config)
    return engine


def bench_from_model_args(
    pretrained: str | None, settings: Mapping[str, Any], batch_size: int | str | None, device: str | None
) -> BenchConfig:
    """Settings from lm-eval's ``--model_args``, ``--batch_size`` and ``--device``.

    A numeric batch size is ``max_num_reqs``, ``cuda:0`` is ``cuda``; what ``settings`` writes wins over both.

    Raises:
        BenchError: no folder is given.
        ConfigError: an unknown name, or a value that cannot be used.
    """
    values = dict(settings)
    folder = pretrained or values.pop("model", None)
    if folder is None:
        raise BenchError("the model diffulex needs the folder of a checkpoint; pass pretrained=FOLDER")
    if isinstance(batch_size, int) or (isinstance(batch_size, str) and batch_size.isdigit()):
        values.setdefault("max_num_reqs", int(batch_size))
    if device is not None:
        values.setdefault("device", device.partition(":")[0])
    return BenchConfig.from_flat({"model": folder, **values}, origin="model_args")
