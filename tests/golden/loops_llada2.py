"""LLaDA2's block loop: all above the threshold, or as many of the best as the schedule asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tests.golden.loops import best, write
from tests.support.full_forward import block_causal_ends

if TYPE_CHECKING:
    from tests.golden.loops import LoopModel, Trace

ONE_AT_LEAST: Final = "threshold (strictly greater), fall back to the single most confident mask"
STOPS_INSIDE: Final = "threshold, stop inside the block as soon as the first eos has no mask before it"
SCHEDULED: Final = (
    "threshold with the schedule block_length/steps tokens a forward at least: all above the threshold if "
    "they are that many, otherwise exactly the scheduled number of most confident masks"
)


def threshold(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Trace]:
    """Blocks on the absolute grid; ends behind the block with an eos, or with `eos_early_stop` inside it."""
    params, ids = case["params"], list(case["prompt_ids"][0])
    size, num_prompt = params["block_length"], len(ids)
    steps = min(params["steps"], params["gen_length"] // params["minimal_topk"])
    total = -(-(num_prompt + params["gen_length"]) // size) * size
    trace: Trace = []
    for start in range(num_prompt // size * size, total, size):
        ids += [loop.mask_id] * (start + size - len(ids))
        for step in range(steps):
            places = [p for p in range(max(start, num_prompt), start + size) if ids[p] == loop.mask_id]
            if not places:
                break
            found = loop.candidates(ids, block_causal_ends(len(ids), size), places)
            sure = torch.nonzero(found.confidence > params["threshold"])[:, 0].tolist()
            count = size // steps + (step < size % steps)
            write(ids, places, found, sure if len(sure) >= count else best(found.confidence, count), trace)
            if params["eos_early_stop"] and _is_answered(ids[num_prompt:], params):
                return ids, trace
        if params["eos_id"] in ids[num_prompt:]:
            break
    return ids, trace


def _is_answered(answer: list[int], params: dict[str, Any]) -> bool:
    """There is an eos and no mask before it."""
    eos = params["eos_id"]
    return eos in answer and params["mask_id"] not in answer[: answer.index(eos)]


LOOPS = dict.fromkeys((ONE_AT_LEAST, STOPS_INSIDE, SCHEDULED), threshold)
