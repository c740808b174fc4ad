"""SDAR's block loop: static, dynamic, sequential and entropy-bounded, any number of steps a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.golden.loops import Candidates, LoopModel, Trace, best, write
from tests.support.full_forward import block_causal_ends

if TYPE_CHECKING:
    from collections.abc import Callable


def sequential(found: Candidates, count: int, params: dict[str, Any]) -> list[int]:
    """The first open positions."""
    return list(range(min(count, len(found.token))))


def static(found: Candidates, count: int, params: dict[str, Any]) -> list[int]:
    """The open positions of highest confidence."""
    return best(found.confidence, count)


def dynamic(found: Candidates, count: int, params: dict[str, Any]) -> list[int]:
    """All above the threshold when these are enough, else the best."""
    sure = torch.nonzero(found.confidence > params["confidence_threshold"])[:, 0].tolist()
    return sure if len(sure) >= count else best(found.confidence, count)


def entropy_bounded(found: Candidates, count: int, params: dict[str, Any]) -> list[int]:
    """Positions of lowest entropy as long as their sum stays below the bound, one at least."""
    entropy = -(found.probs * (found.probs + 1e-12).log()).sum(-1)
    order = torch.argsort(entropy)
    num = int((torch.cumsum(entropy[order], 0) < params["eb_threshold"]).sum())
    return order[: max(num, 1)].tolist()


CHOICES: dict[str, Callable[[Candidates, int, dict[str, Any]], list[int]]] = {
    "block_diffusion/sequential": sequential,
    "block_diffusion/low_confidence_static": static,
    "block_diffusion/low_confidence_dynamic": dynamic,
    "block_diffusion/entropy_bounded": entropy_bounded,
}


def block_loop(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Trace]:
    """Blocks on the absolute grid, one after the other; ends behind the block that holds a stop id."""
    params, ids = case["params"], list(case["prompt_ids"][0])
    size, steps = params["block_length"], params["denoising_steps"]
    num_prompt = len(ids)
    total = -(-(num_prompt + params["gen_length"]) // size) * size
    schedule = [size // steps + (step < size % steps) for step in range(steps)]
    choose = CHOICES[case["algorithm"]]
    trace: Trace = []
    for start in range(num_prompt // size * size, total, size):
        ids += [loop.mask_id] * (start + size - len(ids))
        for step in range(steps + 1):
            places = [p for p in range(max(start, num_prompt), start + size) if ids[p] == loop.mask_id]
            if not places:
                break
            found = loop.candidates(ids, block_causal_ends(len(ids), size), places)
            write(ids, places, found, choose(found, schedule[min(step, steps - 1)], params), trace)
        if any(one in params["stop_token_ids"] for one in ids[num_prompt:]):
            break
    return ids, trace


LOOPS = dict.fromkeys(CHOICES, block_loop)
