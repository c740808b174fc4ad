"""Answers fixed by position, and a harness that decodes them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from tests.support.engines import Harness, Twist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VOCAB, MASK_ID, EOS_IDS = 23, 0, (1, 2)
LENGTH = 400


def table(
    predictions: Mapping[int, tuple[int, float]], *, rest: tuple[int, float] = (5, 0.95)
) -> torch.Tensor:
    """``[LENGTH, VOCAB]``: row p favours ``predictions[p]``, a token and its probability, else `rest`."""
    logits = torch.zeros(LENGTH, VOCAB)
    for position in range(LENGTH):
        token, prob = predictions.get(position, rest)
        logits[position, token] = math.log(prob * (VOCAB - 1) / (1 - prob))
    return logits


def answer(first: int, tokens: Sequence[int], prob: float = 0.95) -> dict[int, tuple[int, float]]:
    """Predictions for `tokens` at positions `first` and following."""
    return {first + offset: (token, prob) for offset, token in enumerate(tokens)}


def table_harness(stub: str, logits: torch.Tensor, **settings: Any) -> Harness:
    """An engine without text over the table; single block, small pages, unless told otherwise."""
    Twist.table = logits
    plain = {"block_size": 4, "page_size": 4, "buffer_size": 1, "num_pages": 64, "max_model_len": 128}
    return Harness(model=stub, **{**plain, "max_num_batched_tokens": 512, **settings})


def hash_harness(stub: str, **settings: Any) -> Harness:
    """An engine without text whose answers depend on exactly what each row sees."""
    Twist.table = None
    plain = {"block_size": 4, "page_size": 4, "buffer_size": 2, "num_pages": 64, "max_model_len": 128}
    return Harness(model=stub, **{**plain, "max_num_batched_tokens": 512, **settings})
