"""One request of lm-eval on its way through the adapter: who asked, how, and for which prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffulex.utils.output import NfeCounts, RequestOutput
from diffulex_bench.generation import THINK_OPEN

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from diffulex.sampling_params import SamplingParams
    from diffulex_bench.generation import GenerationPlan
    from diffulex_bench.prompts import Prompt, PromptBuilder


@dataclass(frozen=True, slots=True)
class Job:
    """A request with everything that was decided about it before it runs."""

    index: int
    request: Instance
    task: str
    doc_id: int
    repeat: int
    plan: GenerationPlan
    prompt: Prompt
    seed: int

    @property
    def opens_thinking(self) -> bool:
        """True when the prompt ends inside a thinking part, so that the answer begins with thoughts."""
        return self.prompt.text.rstrip().endswith(THINK_OPEN)

    def sampling_params(self, prompts: PromptBuilder) -> SamplingParams:
        """The engine's parameters. Stop strings that thoughts could trigger are left to the final cut."""
        stops, stop_ids = prompts.split_stops(self.plan.stops)
        return self.plan.sampling_params(
            seed=self.seed, stops=() if self.opens_thinking else stops, stop_token_ids=stop_ids
        )

    def refused(self) -> RequestOutput:
        """The output of a job that cannot run: no tokens, no passes, the reason in `error`."""
        now = time.perf_counter()
        return RequestOutput(
            req_id=self.index,
            token_ids=[],
            full_token_ids=[],
            text="",
            full_text="",
            completion_reason="error",
            num_prompt_tokens=len(self.prompt.token_ids),
            num_cached_tokens=0,
            num_decoded_tokens=0,
            num_unfilled=0,
            num_preemptions=0,
            num_forward_tokens=0,
            nfe=NfeCounts(),
            arrival_time=now,
            first_token_time=None,
            finish_time=now,
            error=self.prompt.error,
        )
