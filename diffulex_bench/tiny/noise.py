"""Noisy copies of an answer for block diffusion training.

A training row is the clean text plus noisy copies of its blocks from the one that holds the end of the
prompt. The visibility rule: a clean token sees the clean blocks up to its own. A noisy token belongs to a
group of consecutive blocks of its copy; it sees the clean blocks before the group and the group's noisy
blocks up to its own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diffulex_bench.tiny.recipe import Noise

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NoisyCopy:
    """Masks and grouping of one noisy copy.

    Attributes:
        is_masked: ``[num_blocks, block_size]``, true where the mask token stands.
        group_starts: ``[num_blocks]``, for each block the first block of its group, counted inside the copy.
    """

    is_masked: Bools
    group_starts: Ints


def single_block_copy(is_answer: Bools, random: np.random.Generator) -> NoisyCopy:
    """Return a copy whose blocks stand alone, each with at least one masked answer token.

    Args:
        is_answer: ``[num_blocks, block_size]``, false on the prompt's tail.
        random: Source of the noise.
    """
    num_blocks = len(is_answer)
    num_masks = random.integers(1, is_answer.sum(axis=1) + 1)
    return NoisyCopy(_masked(is_answer, num_masks, random), np.arange(num_blocks, dtype=np.int32))


def multi_block_copy(is_answer: Bools, noise: Noise, random: np.random.Generator) -> NoisyCopy:
    """Return a copy in groups of two to ``max_group`` blocks, later ones at least as noisy as earlier ones.

    The first group may be cut short, so that groups begin at every offset.
    """
    num_blocks, block_size = is_answer.shape
    group_starts = np.empty(num_blocks, dtype=np.int32)
    ratios = np.empty(num_blocks)
    start = 0
    while start < num_blocks:
        size = int(random.integers(2, noise.max_group + 1))
        if start == 0:
            size = int(random.integers(1, size + 1))
        end = min(start + size, num_blocks)
        group_starts[start:end] = start
        ratios[start:end] = np.sort(random.integers(0, block_size + 1, end - start)) / block_size
        start = end
    num_masks = np.round(ratios * is_answer.sum(axis=1)).astype(np.int64)
    return NoisyCopy(_masked(is_answer, num_masks, random), group_starts)


def _masked(is_answer: Bools, num_masks: npt.NDArray[np.int64], random: np.random.Generator) -> Bools:
    """Mask the given number of answer tokens of each block, chosen at random."""
    draws = np.where(is_answer, random.random(is_answer.shape), 2.0)
    ranks = draws.argsort(axis=1).argsort(axis=1)
    masked: Bools = ranks < num_masks[:, None]
    return masked
