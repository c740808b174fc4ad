"""Small makers for the bench's tests: records, outputs, instances, a tokenizer, an engine without a model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance

from diffulex.utils.output import GenerationOutput, NfeCounts, RequestOutput, StepReport
from diffulex_bench.records import SampleRecord, costs_of, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffulex.config import Config, ExplainRow
    from diffulex.sampling_params import SamplingParams


def make_output(
    text: str = "#### 1",
    *,
    tokens: int | None = None,
    nfe: NfeCounts | None = None,
    reason: str = "eos_token_generated",
    arrival: float = 0.0,
    first: float | None = 0.1,
    finish: float = 1.0,
    **more: Any,
) -> RequestOutput:
    num = len(text) if tokens is None else tokens
    values: dict[str, Any] = {
        "req_id": 0, "token_ids": list(range(num)), "full_token_ids": list(range(num)), "text": text,
        "full_text": text, "completion_reason": reason, "num_prompt_tokens": 5, "num_cached_tokens": 0,
        "num_decoded_tokens": num + 1, "num_unfilled": 0, "num_preemptions": 0, "num_forward_tokens": 40,
        "nfe": nfe or NfeCounts(prefill=1, denoise=3, store=1), "arrival_time": arrival,
        "first_token_time": first, "finish_time": finish,
    }  # fmt: skip
    return RequestOutput(**{**values, **more})


def make_record(
    source: RequestOutput | None = None, *, task: str = "toy", doc_id: int = 0, repeat: int = 0, **more: Any
) -> SampleRecord:
    one = source or make_output()
    values: dict[str, Any] = {
        "task": task, "doc_id": doc_id, "repeat": repeat, "prompt": "q\n", "prompt_sha256": sha256_of("q\n"),
        "prompt_too_long": False, "target": "1", "output": one.text, "thinking": None, "extracted": "1",
        "extraction_method": "hash_marker", "scores": {"strict_match": 1.0, "flexible_match": 1.0},
        "empty": not one.text.strip(), "num_prompt_tokens_cut": 0, "seed": 1, **costs_of(one, 0.0),
    }  # fmt: skip
    return SampleRecord(**{**values, **more})


def make_instance(
    prompt: str, kwargs: dict[str, Any] | None = None, *, task: str = "toy", doc_id: int = 0, doc: Any = None
) -> Instance:
    return Instance(
        request_type="generate_until",
        doc=doc or {"question": prompt, "answer": "1"},
        arguments=(prompt, kwargs if kwargs is not None else {"until": []}),
        idx=0,
        metadata=(task, doc_id, 1),
    )


class CharTokenizer:
    """One token a character; BOS is 1, ``<|end|>`` is 2 and special."""

    bos_token: str | None = "<s>"
    chat_template: str | None = "{{ messages }}"
    adds_bos = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            special = {"<s>": 1, "<|end|>": 2}
            found = next((mark for mark in special if text.startswith(mark)), None)
            ids.append(special[found] if found else ord(text[0]) + 10)
            text = text[len(found) if found else 1 :]
        if add_special_tokens and self.adds_bos and ids[:1] != [1]:
            ids = [1, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {1: "<s>", 2: "<|end|>"}
        return "".join(
            ("" if skip_special_tokens else special[one]) if one in special else chr(one - 10)
            for one in token_ids
        )

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"[{one['role']}]{one['content']}" for one in messages) + "[assistant]"


@dataclass
class FakeConfig:
    """What the adapter reads of a configuration."""

    max_model_len: int = 2048
    model: str = "/models/toy"
    tokenizer_path: str | None = None
    started: Config | None = None

    def explain(self) -> list[ExplainRow]:
        """Rows of the configuration that the engine was started with."""
        assert self.started is not None
        return self.started.explain()

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.model, "max_model_len": self.max_model_len}


@dataclass
class FakeEngine:
    """Answers prompts by a function of their text, in reverse order to catch index slips."""

    answer: Callable[[str], str]
    config: FakeConfig = field(default_factory=FakeConfig)
    tokenizer: CharTokenizer = field(default_factory=CharTokenizer)
    interrupt_after: int | None = None
    interrupt: type[BaseException] | BaseException = KeyboardInterrupt
    seen: list[tuple[str, SamplingParams]] = field(default_factory=list)
    exited: bool = False

    def start(self, config: Config) -> FakeEngine:
        """The engine, having measured 77 pages."""
        self.config.started = config.resolved(num_pages=77)
        return self

    def generate(
        self,
        prompts: list[list[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        on_invalid: str = "raise",
    ) -> GenerationOutput:
        assert on_invalid == "record"
        assert on_finish is not None
        outputs: dict[int, RequestOutput] = {}
        for index in reversed(range(len(prompts))):
            if self.interrupt_after is not None and len(self.seen) >= self.interrupt_after:
                raise self.interrupt
            text = self.tokenizer.decode(prompts[index], skip_special_tokens=False)
            params = sampling_params[index]
            self.seen.append((text, params))
            now = time.perf_counter()
            answer = self.answer(text)
            hits = [at for stop in params.stop if (at := answer.find(stop)) >= 0]
            reason = "stop_string" if hits else "eos_token_generated"
            outputs[index] = make_output(
                answer[: min(hits)] if hits else answer,
                tokens=len(answer),
                arrival=now,
                first=now + 0.01 if answer else None,
                finish=now + 0.02,
                reason=reason,
                req_id=index,
            )
            on_finish(index, outputs[index])
            if on_step is not None:
                times = {"schedule": 1.0, "prepare": 1.0, "forward": 6.0, "sample": 1.0, "post": 0.5}
                rows = {"prefill": 6, "denoise": 1, "store": 1}
                on_step(StepReport(index, 0, 0, 8, 4, 10.0, times, (), rows))
        return GenerationOutput([outputs[index] for index in range(len(prompts))], 0.1)

    def exit(self) -> None:
        self.exited = True
