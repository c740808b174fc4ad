"""What the families' reference loops run on: our forward over a whole sequence, our choice of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffulex.config import Config
from diffulex.model.loader import load_model
from diffulex.sampler.base import SamplerInput
from diffulex.sampler.confidence import choose_tokens
from diffulex.sampling_params import FORCE_SCORES
from diffulex.settings.defaults import MODEL_DEFAULTS
from tests.support.full_forward import full_logits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from diffulex.model.decoder import DiffusionLM

Trace = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Candidates:
    """The best token of each open position, its probability, the score that ranks it, its distribution."""

    token: list[int]
    confidence: Tensor
    score: Tensor
    probs: Tensor


@dataclass(frozen=True)
class LoopModel:
    """A model whose row of position i, shifted where the family does so, predicts position i."""

    model: DiffusionLM
    mask_id: int
    vocab_limit: int
    shift: bool

    def candidates(
        self, ids: list[int], ends: Tensor, places: Sequence[int], score: str = "prob"
    ) -> Candidates:
        """What one forward over `ids` predicts for `places`."""
        rows = [max(place - 1, 0) for place in places] if self.shift else list(places)
        logits = full_logits(self.model, ids, ends)[rows]
        kind = torch.full((len(rows),), FORCE_SCORES.index(score))
        inputs = SamplerInput(
            torch.zeros(len(rows), dtype=torch.int64),
            torch.ones(1, dtype=torch.bool),
            1.0,
            self.mask_id,
            self.vocab_limit,
            force_score_N=kind,
        )
        token, confidence, scores = choose_tokens(logits, inputs)
        return Candidates(token.tolist(), confidence, scores, logits.softmax(-1))


def load_loop_model(folder: Path, model_name: str, mask_id: int) -> LoopModel:
    config = Config(
        model=str(folder), model_name=model_name, decoding_strategy="multi_bd", mask_token_id=mask_id
    )
    model = load_model(config, torch.device("cpu"), torch.float32)
    return LoopModel(model, mask_id, config.vocab_limit, MODEL_DEFAULTS[model_name].shift_logits)


def best(score: Tensor, count: int) -> list[int]:
    """Indices of the highest scores."""
    return torch.topk(score, min(count, len(score))).indices.tolist()


def write(
    ids: list[int], places: Sequence[int], found: Candidates, picks: Sequence[int], trace: Trace
) -> None:
    """Fill the picked places and note them as one forward."""
    for i in picks:
        ids[places[i]] = found.token[i]
    trace.append(sorted((places[i], found.token[i]) for i in picks))
