"""Engines over a small random network, with everything that users get: tokenizer, text, outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex import Diffulex, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from diffulex.utils.output import RequestOutput

VOCAB, MASK_ID, EOS_ID = 64, 0, 1
#: Eight prompts of lengths 3 to 60; some begin alike.
_SHAPES = ((3, 3), (5, 60), (7, 8), (3, 17), (5, 33), (11, 16), (5, 9), (13, 24))
PROMPTS = [[2 + (place * step + length) % 62 for place in range(length)] for step, length in _SHAPES]
PROMPTS[5] = PROMPTS[4][:12] + PROMPTS[5][:4]


def make_engine(folder: Path, **settings: Any) -> Diffulex:
    """An engine for two open blocks of four positions, unless told otherwise."""
    plain = {
        "model_name": "sdar", "decoding_strategy": "multi_bd", "block_size": 4, "page_size": 8,
        "buffer_size": 2, "max_model_len": 128, "max_num_batched_tokens": 512, "num_pages": 200,
        "max_num_reqs": 8, "accept_threshold": 0.6,
    }  # fmt: skip
    return Diffulex(str(folder), **{**plain, **settings})


def greedy(max_tokens: int = 24, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})


def essence(output: RequestOutput) -> tuple[list[int], str, int]:
    """What may depend on nothing but the prompt: tokens, reason, denoising forwards."""
    return output.token_ids, output.completion_reason, output.nfe.denoise


def run_all(
    folder: Path, prompts: Sequence[Sequence[int]], params: Any = None, **settings: Any
) -> list[RequestOutput]:
    """Outputs of one engine made for the occasion."""
    with make_engine(folder, **settings) as engine:
        return engine.generate([list(prompt) for prompt in prompts], params or greedy()).trajectories
