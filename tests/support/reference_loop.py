"""Block diffusion for one request, written from the rules alone: full recomputation, no cache, no batch.

Independent of the engine. Works with any `predict(tokens, ends) -> [len(tokens)] (token, probability)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

Predict = "Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.float32]]]"


@dataclass
class LoopResult:
    output_ids: list[int]
    reason: str
    num_denoise: int
    accepted: list[list[tuple[int, int]]] = field(default_factory=list)


@dataclass
class LoopRules:
    block_size: int
    buffer_size: int
    mask_id: int
    eos_ids: tuple[int, ...]
    add: float = 0.1
    semi: float = 0.9
    accept: float = 0.9
    max_tokens: int = 64
    max_model_len: int = 10**6
    shift: bool = False
    always_force: bool = False


def block_diffusion(
    prompt: Sequence[int],
    rules: LoopRules,
    predict: Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.float32]]],
) -> LoopResult:
    """Decodes `prompt`; forwards that only store are not made, so only denoising forwards are counted."""
    size, num_prompt = rules.block_size, len(prompt)
    limit = min(num_prompt + rules.max_tokens, rules.max_model_len)
    num_blocks = -(-limit // size)
    tokens = np.full(num_blocks * size, rules.mask_id, np.int64)
    tokens[:num_prompt] = prompt
    open_at = np.ones(len(tokens), bool)
    open_at[:num_prompt] = False
    first = num_prompt // size  # first block that is not wholly prompt
    front = first  # blocks from `first` to `front` exclusive are open or finished
    done_stored = first  # blocks before it have left the window
    just_done: set[int] = set()
    accepted: list[list[tuple[int, int]]] = []
    stop: int | None = None

    def progress(block: int) -> float:
        return 1 - open_at[block * size : (block + 1) * size].sum() / size

    def open_one() -> None:
        nonlocal front
        slots = 2 if rules.buffer_size == 1 else rules.buffer_size
        threshold = 1.0 if rules.buffer_size == 1 else rules.add
        if stop is not None or front >= num_blocks or front - done_stored >= slots:
            return
        if front == done_stored or progress(front - 1) >= threshold:
            front += 1

    if num_prompt % size:
        front += 1
    open_one()
    while True:
        end = front * size
        window = range(done_stored, front)
        stored_now = {b for b in window if b in just_done}
        ends = (np.arange(end) // size + 1) * size
        token, prob = predict(tokens[:end], ends)
        if rules.shift:
            token, prob = np.roll(token, 1), np.roll(prob, 1)
        writes: list[int] = []
        for block in window:
            places = np.arange(block * size, (block + 1) * size)
            places = places[open_at[places]]
            if not len(places):
                continue
            sure = places[prob[places] > np.float32(rules.accept)]
            left = block - 1
            may_force = rules.always_force or left < done_stored or progress(left) >= rules.semi
            if len(sure):
                writes += sure.tolist()
            elif may_force:
                writes.append(int(places[np.argmax(prob[places])]))
        for place in writes:
            tokens[place] = token[place]
        was_open = any(progress(block) < 1 for block in window)
        open_at[writes] = False
        if was_open:
            accepted.append([(place, int(token[place])) for place in sorted(writes)])
        # Blocks stored by this forward leave the window; complete ones wait behind complete ones only.
        for block in sorted(stored_now):
            if block == done_stored:
                done_stored += 1
        just_done = set()
        for block in range(done_stored, front):
            if progress(block) < 1:
                break
            just_done.add(block)
        hits = [p for p in writes if int(tokens[p]) in rules.eos_ids and p < limit]
        if hits:
            stop = min([*hits, *([stop] if stop is not None else [])])
        if stop is not None:
            front = min(front, stop // size + 1)
            if not open_at[num_prompt:stop].any():
                output = tokens[num_prompt:stop].tolist()
                return LoopResult(output, "eos_token_generated", len(accepted), accepted)
        if not open_at[num_prompt:limit].any() and front * size >= limit:
            output = tokens[num_prompt:limit].tolist()
            by_tokens = limit == num_prompt + rules.max_tokens
            reason = "max_new_tokens_reached" if by_tokens else "max_model_len_reached"
            return LoopResult(output, reason, len(accepted), accepted)
        open_one()
