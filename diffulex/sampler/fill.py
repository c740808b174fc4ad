"""The standard sampler, `sampling_mode: naive`: fill masks, never change what is filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.sampler.accept import accept_confident
from diffulex.sampler.base import AutoSampler, Sampler, SamplerInput, SamplerOutput
from diffulex.sampler.confidence import choose_tokens

if TYPE_CHECKING:
    from torch import Tensor


@AutoSampler.register("naive")
class FillSampler(Sampler):
    """Confidence threshold with at least one position a block that may be forced."""

    def __call__(self, logits_NV: Tensor, inputs: SamplerInput) -> SamplerOutput:
        """Decides all rows of all requests at once."""
        token_N, confidence_N, score_N = choose_tokens(logits_NV, inputs)
        accepted_N = accept_confident(
            confidence_N, score_N, inputs.groups_N, inputs.can_force_G, inputs.accept_threshold
        )
        return SamplerOutput(token_N, confidence_N, accepted_N)
