"""Types of every sampler. Axes: N sampled rows of all requests, V vocabulary, G blocks that are sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffulex.utils.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """What a sampler needs besides the logits.

    Attributes:
        groups_N: ``[N] int64`` block of each row; rows of a block stand together, in order of position.
        can_force_G: ``[G] bool`` the block may fill its best position when none is confident enough.
        accept_threshold: a token is accepted when its probability is strictly above this.
        banned_id: the mask id; it never wins.
        vocab_limit: ids from here on are padding of the vocabulary and never win.
        temperature_N: ``[N] float32`` or None when every request is greedy. 0 means argmax.
        top_p_N: ``[N] float32``; 1 keeps everything. Given with `temperature_N`.
        top_k_N: ``[N] int64``; 0 keeps everything. Given with `temperature_N`.
        uniform_N: ``[N] float64`` in ``[0, 1)``, the draw of each row. Given with `temperature_N`.
        force_score_N: ``[N] int64`` how the best position of a block is chosen: index into `FORCE_SCORES`, or
            None for probability everywhere.
    """

    groups_N: Tensor
    can_force_G: Tensor
    accept_threshold: float
    banned_id: int
    vocab_limit: int
    temperature_N: Tensor | None = None
    top_p_N: Tensor | None = None
    top_k_N: Tensor | None = None
    uniform_N: Tensor | None = None
    force_score_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Decision for each row.

    Attributes:
        token_N: ``[N] int64``.
        confidence_N: ``[N] float32`` probability at temperature 1; NaN where the logits were not finite.
        accepted_N: ``[N] bool``.
    """

    token_N: Tensor
    confidence_N: Tensor
    accepted_N: Tensor


class Sampler(ABC):
    """Turns logits into decisions; stateless."""

    @abstractmethod
    def __call__(self, logits_NV: Tensor, inputs: SamplerInput) -> SamplerOutput:
        """Decides all rows of all requests at once; rows of one block never influence another block."""


class _SamplerRegistry(Registry[Sampler]):
    """Samplers by sampling mode."""


AutoSampler: _SamplerRegistry = _SamplerRegistry("sampler", Sampler)
