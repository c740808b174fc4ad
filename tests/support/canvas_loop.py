"""Whole answers of DiffusionGemma, canvas after canvas, on the network and the sampler without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from diffulex.sampler.diffusion_gemma import CanvasRules, CanvasStep, NoiseSource, StopTest, denoise_step
from tests.support.canvas import CanvasRun

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.model.diffusion_gemma import DiffusionGemmaLM


@dataclass
class Answer:
    """Ids of whole canvases, padded behind the first stop id, and the steps of each canvas."""

    ids: list[int] = field(default_factory=list)
    steps: list[list[CanvasStep]] = field(default_factory=list)
    num_encodes: int = 0


def decode(
    model: DiffusionGemmaLM,
    prompt: list[int],
    rules: CanvasRules,
    noise: NoiseSource,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    pad_id: int = 0,
    page_size: int = 16,
) -> Answer:
    """Encode the prompt; denoise a canvas and encode it, until one holds a stop id or enough are there."""
    size = model.config.canvas_length
    num_canvases = -(-max_new_tokens // size)
    end = len(prompt)
    run = CanvasRun(model, page_size, num_pages=(end + num_canvases * size) // page_size + 1)
    answer, stop, text = Answer(), StopTest(rules), torch.tensor(prompt)
    for _ in range(num_canvases):
        run.encode([(0, text, end - len(text))])
        answer.num_encodes += 1
        canvas, tempered, steps, is_done = noise.initial_canvas(size), None, [], False
        stop.reset()
        while not is_done:
            (logits,) = run.denoise([(0, canvas, end)], tempered)
            tempered = [logits / rules.temperature(rules.max_denoising_steps - len(steps))]
            steps.append(denoise_step(tempered[0], noise, rules.entropy_bound))
            canvas, is_done = steps[-1].next_C, stop.is_done(steps[-1])
        text = steps[-1].argmax_C
        end += size
        answer.steps.append(steps)
        ids = text.tolist()
        first_stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
        if first_stop is not None:
            answer.ids += ids[: first_stop + 1] + [pad_id] * (size - first_stop - 1)
            break
        answer.ids += ids
    return answer
