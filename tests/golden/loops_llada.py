"""LLaDA's own generation, and Fast-dLLM's threshold for it without a cache.

Every forward reads prompt and the whole answer, both ways, also the blocks that come later; the end of a text
does not stop it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.golden.loops import LoopModel, Trace, best, write

if TYPE_CHECKING:
    from collections.abc import Iterator


def open_blocks(loop: LoopModel, ids: list[int], params: dict[str, Any]) -> Iterator[int]:
    """Makes room for the answer; the end of each block in turn, as long as there are masks before it."""
    start = len(ids)
    ids += [loop.mask_id] * params["gen_length"]
    for end in range(start + params["block_length"], len(ids) + 1, params["block_length"]):
        while loop.mask_id in ids[:end]:
            yield end


def low_confidence(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Trace]:
    """A block is filled in a fixed number of steps, the first ones one more where it does not divide."""
    params, ids = case["params"], list(case["prompt_ids"][0])
    steps = params["steps_per_block"]
    base, more = divmod(params["block_length"], steps)
    trace: Trace = []
    for end in open_blocks(loop, ids, params):
        places = [p for p in range(end) if ids[p] == loop.mask_id]
        found = loop.candidates(ids, torch.full((len(ids),), len(ids), dtype=torch.int32), places)
        count = base + (len(trace) % steps < more)
        write(ids, places, found, best(found.confidence, count), trace)
    return ids, trace


def threshold(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Trace]:
    """A step fills the best mask of the block, and those that reach the threshold."""
    params, ids = case["params"], list(case["prompt_ids"][0])
    trace: Trace = []
    for end in open_blocks(loop, ids, params):
        places = [p for p in range(end) if ids[p] == loop.mask_id]
        found = loop.candidates(ids, torch.full((len(ids),), len(ids), dtype=torch.int32), places)
        (surest,) = best(found.confidence, 1)
        sure = torch.nonzero(found.confidence >= params["threshold"])[:, 0].tolist()
        write(ids, places, found, sorted({surest, *sure}), trace)
    return ids, trace


LOOPS = {"llada_low_confidence": low_confidence, "fast_dllm_threshold_no_cache": threshold}
