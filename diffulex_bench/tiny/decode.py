"""Plain decoding for evaluation: every forward recomputes the whole text, nothing is cached.

It follows the rules of the ``multi_bd`` strategy, so its answers are what the engine should give up to
rounding. It is kept apart from the engine so that training needs no engine and the engine can be compared
with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffulex_bench.tiny.network import Network, block_causal_visibility
from diffulex_bench.tiny.tokenizer import EOS_ID, MASK_ID

# Axes: N texts, L positions, W window positions, S open blocks.


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Thresholds of block decoding; blocks of ``block_size`` positions lie on the grid from position 0."""

    block_size: int = 16
    buffer_size: int = 1
    accept_threshold: float = 0.9
    add_block_threshold: float = 0.1
    semi_complete_threshold: float = 0.9
    max_tokens: int = 320


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer: its tokens before the end token, whether it ended, and the forwards that denoised it."""

    ids: tuple[int, ...]
    is_finished: bool
    num_forwards: int


@torch.inference_mode()
def decode(network: Network, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> list[Decoded]:
    """Return the greedy answer of each prompt."""
    device = network.model.embed_tokens.weight.device
    size = settings.block_size
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    # The buffer may reach behind the last position asked for; those blocks change nothing before them.
    length = ((max(map(len, prompts)) + settings.max_tokens - 1) // size + settings.buffer_size) * size
    ids = torch.full((len(prompts), length), MASK_ID, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    num_blocks = length // size
    visible = block_causal_visibility(length, size, device)
    num_open = torch.ones(len(prompts), dtype=torch.long, device=device)
    num_forwards = torch.zeros(len(prompts), dtype=torch.long, device=device)
    running = torch.arange(len(prompts), device=device)
    while len(running):
        now = ids[running]
        first = (now != MASK_ID).view(-1, num_blocks, size).all(-1).long().argmin(-1)
        reach = int((first.max() + settings.buffer_size) * size)
        now, num_open[running] = _step(network, now, first, num_open[running], reach, visible, settings)
        ids[running] = now
        num_forwards[running] += 1
        ends, limit = _ends(now, starts[running]), starts[running] + settings.max_tokens
        filled = (now != MASK_ID).long().cumprod(-1).sum(-1)
        is_done = (filled > ends) | (filled >= limit)
        running = running[~is_done]
    ends = torch.minimum(_ends(ids, starts), starts + settings.max_tokens)
    is_finished = ends < starts + settings.max_tokens
    return [
        Decoded(
            tuple(ids[row, starts[row] : ends[row]].tolist()), bool(is_finished[row]), int(num_forwards[row])
        )
        for row in range(len(prompts))
    ]


def _step(
    network: Network,
    ids: Tensor,
    first: Tensor,
    num_open: Tensor,
    reach: int,
    visible: Tensor,
    settings: DecodeSettings,
) -> tuple[Tensor, Tensor]:
    """Do one forward; return the filled texts ``[N, L]`` and the open blocks of each ``[N]``."""
    size, num_slots = settings.block_size, settings.buffer_size
    num_texts = len(ids)
    positions = torch.arange(reach, device=ids.device).expand(num_texts, reach)
    hidden = network(ids[:, :reach], positions, visible[:reach, :reach])
    window = first[:, None] * size + torch.arange(num_slots * size, device=ids.device)
    tokens, confidence = _choices(
        network, hidden.gather(1, window[..., None].expand(-1, -1, hidden.shape[-1]))
    )
    before = ids.gather(1, window)
    num_open = _with_next(before, num_open, settings)
    slot = torch.arange(num_slots, device=ids.device)
    is_open = (slot < num_open[:, None]).repeat_interleave(size, dim=1)
    is_masked = (before == MASK_ID) & is_open
    accepted = is_masked & (confidence > settings.accept_threshold)
    accepted |= _forced(accepted, is_masked, confidence, before, settings)
    after = torch.where(accepted, tokens, before)
    return ids.scatter(1, window, after), _without_complete(after, num_open, settings)


def _choices(network: Network, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token of each position and its probability, the mask token excluded."""
    logits = network.logits(hidden).float()
    logits[..., MASK_ID] = -torch.inf
    confidence, tokens = logits.softmax(-1).max(-1)
    return tokens, confidence


def _forced(
    accepted: Tensor, is_masked: Tensor, confidence: Tensor, before: Tensor, settings: DecodeSettings
) -> Tensor:
    """Return the best position of each block that accepted none and follows a nearly complete one."""
    shape = (len(before), settings.buffer_size, settings.block_size)
    progress = (before != MASK_ID).view(shape).float().mean(-1)
    left = torch.cat((torch.ones_like(progress[:, :1]), progress[:, :-1]), dim=1)
    may_force = (left >= settings.semi_complete_threshold) & ~accepted.view(shape).any(-1)
    candidates = torch.where(is_masked, confidence, -1.0).view(shape)
    best, where = candidates.max(-1)
    forced = torch.zeros(shape, dtype=torch.bool, device=before.device)
    forced.scatter_(2, where[..., None], (may_force & (best >= 0))[..., None])
    return forced.view(len(before), -1)


def _with_next(before: Tensor, num_open: Tensor, settings: DecodeSettings) -> Tensor:
    """Open one more block where the last open one has progressed enough and the buffer has room."""
    shape = (len(before), settings.buffer_size, settings.block_size)
    progress = (before != MASK_ID).view(shape).float().mean(-1)
    last = progress.gather(1, (num_open - 1)[:, None])[:, 0]
    grown = num_open + (last >= settings.add_block_threshold).long()
    return grown.clamp(max=settings.buffer_size)


def _without_complete(after: Tensor, num_open: Tensor, settings: DecodeSettings) -> Tensor:
    """Return how many open blocks remain, counted from the first incomplete one; never fewer than one."""
    shape = (len(after), settings.buffer_size, settings.block_size)
    num_complete = (after != MASK_ID).view(shape).all(-1).long().cumprod(-1).sum(-1)
    return (num_open - num_complete).clamp(min=1)


def _ends(ids: Tensor, starts: Tensor) -> Tensor:
    """Return the place of the first end token behind each prompt, the text's length when there is none."""
    places = torch.arange(ids.shape[1], device=ids.device)
    is_end = (ids == EOS_ID) & (places >= starts[:, None])
    return torch.where(is_end, places, ids.shape[1]).amin(-1)
