"""Dream's own generation over a whole canvas, and Fast-dLLM's capped threshold for it.

Every forward reads prompt and canvas, both ways; the end of a text does not stop it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.golden.loops import LoopModel, Trace, best, write

if TYPE_CHECKING:
    from torch import Tensor

SCORES = {"maskgit_plus": "prob", "topk_margin": "margin", "entropy": "neg_entropy"}


def canvas_of(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Tensor]:
    """Prompt and masks, and what each position sees: everything."""
    ids = case["prompt_ids"][0] + [loop.mask_id] * case["params"]["max_new_tokens"]
    return ids, torch.full((len(ids),), len(ids), dtype=torch.int32)


def shares(params: dict[str, Any]) -> list[float]:
    """Share of the masks left that each step fills; the last step fills all."""
    times = torch.linspace(1, params["eps"], params["steps"] + 1)
    return [float(1 - times[step + 1] / times[step]) for step in range(params["steps"] - 1)] + [1.0]


def scheduled(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Trace]:
    """Each step fills its share of the masks left, rounded down, the best ones first."""
    ids, ends = canvas_of(loop, case)
    trace: Trace = []
    for share in shares(case["params"]):
        places = [p for p, one in enumerate(ids) if one == loop.mask_id]
        found = loop.candidates(ids, ends, places, SCORES[case["params"]["alg"]])
        write(ids, places, found, best(found.score, int(len(places) * share)), trace)
    return ids, trace


def origin(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Trace]:
    """Each mask is filled with the probability of the step's share; the case holds the numbers drawn."""
    ids, ends = canvas_of(loop, case)
    trace: Trace = []
    for share, draws in zip(shares(case["params"]), case["rng"]["uniform_draws_per_step"], strict=True):
        places = [p for p, one in enumerate(ids) if one == loop.mask_id]
        found = loop.candidates(ids, ends, places)
        write(ids, places, found, [i for i in range(len(places)) if draws[i] < share or share == 1.0], trace)
    return ids, trace


def capped_threshold(loop: LoopModel, case: dict[str, Any]) -> tuple[list[int], Trace]:
    """Fast-dLLM: a budget a step, of which the best is filled and the others when they reach the threshold.

    What a step leaves of its budget is added to the next one's; after the last step the budget is all.
    """
    params = case["params"]
    ids, ends = canvas_of(loop, case)
    trace: Trace = []
    carried = 0
    while loop.mask_id in ids:
        places = [p for p, one in enumerate(ids) if one == loop.mask_id]
        found = loop.candidates(ids, ends, places)
        budget = params["max_new_tokens"] // params["steps"] + carried
        ranked = best(found.score, budget if len(trace) < params["steps"] else len(places))
        picks = [i for i in ranked if i == ranked[0] or float(found.score[i]) >= params["threshold"]]
        carried = len(ranked) - len(picks)
        write(ids, places, found, picks, trace)
    return ids, trace


LOOPS = {
    "dream_origin": origin,
    "dream_maskgit_plus": scheduled,
    "dream_topk_margin": scheduled,
    "dream_entropy": scheduled,
    "dream_confidence_threshold": capped_threshold,
}
