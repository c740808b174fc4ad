"""One request of lm-eval on its way through the adapter: who asked, how, and for which prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffulex.engine.outputs import invalid_output
from diffulex_bench.generation import THINK_OPEN

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from diffulex.sampling_params import SamplingParams
    from diffulex.utils.output import RequestOutput
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
        output = invalid_output(self.index, self.prompt.error or "the prompt cannot run")
        output.num_prompt_tokens = len(self.prompt.token_ids)
        return output
