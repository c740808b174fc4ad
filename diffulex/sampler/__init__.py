"""Samplers: logits in, chosen tokens and accepted positions out. They never see a request."""

from diffulex.sampler.base import AutoSampler, Sampler, SamplerInput, SamplerOutput
from diffulex.sampler.fill import FillSampler

__all__ = ["AutoSampler", "FillSampler", "Sampler", "SamplerInput", "SamplerOutput"]
