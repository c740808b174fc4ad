"""Training rows: a problem's tokens with two noisy copies, packed many to a row of fixed length.

Everything that the visibility rule of `noise` needs travels as four numbers a token, so packing, masks and
tests speak the same language: token q sees token k when both belong to the same problem and either k is
clean and its block lies before ``clean_end`` of q, or k is noisy, of q's group, and its block is not after
q's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from diffulex_bench.tiny.noise import Ints, NoisyCopy, multi_block_copy, single_block_copy
from diffulex_bench.tiny.recipe import Noise
from diffulex_bench.tiny.tokenizer import EOS_ID, MASK_ID, PAD_ID

_NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one row or of a packed batch, all arrays of one shape, int32.

    Attributes:
        ids: Token ids as the network sees them.
        targets: The true token where the loss counts, -1 elsewhere.
        positions: Position in the problem's text; a noisy token has the position of its clean original.
        problem: Which problem of the packed row the token belongs to, -1 for filling.
        block: Block of the position.
        group: Group of a noisy token, unique inside a problem; -1 for a clean one.
        clean_end: The token sees clean blocks ``[0, clean_end)``.
    """

    ids: Ints
    targets: Ints
    positions: Ints
    problem: Ints
    block: Ints
    group: Ints
    clean_end: Ints


def training_row(prompt: list[int], answer: list[int], noise: Noise, random: np.random.Generator) -> Tokens:
    """Return the clean text, a copy for one open block and a copy for several, one after the other.

    The text ends with its end token, which also fills the last block; there alone filling is learned. The
    clean copy lacks the last block, which no noisy token sees.
    """
    size = noise.block_size
    first_block = len(prompt) // size
    text = [*prompt, *answer, EOS_ID]
    num_blocks = -(-len(text) // size)
    ids = np.full(num_blocks * size, EOS_ID, dtype=np.int32)
    ids[: len(text)] = text
    is_answer = (np.arange(first_block * size, num_blocks * size) >= len(prompt)).reshape(-1, size)
    num_clean = (num_blocks - 1) * size
    clean_block = np.arange(num_clean, dtype=np.int32) // size
    parts = [
        Tokens(
            ids=ids[:num_clean],
            targets=np.full(num_clean, -1, dtype=np.int32),
            positions=np.arange(num_clean, dtype=np.int32),
            problem=np.zeros(num_clean, dtype=np.int32),
            block=clean_block,
            group=np.full(num_clean, _NO_GROUP, dtype=np.int32),
            clean_end=clean_block + 1,
        )
    ]
    copies = [single_block_copy(is_answer, random), multi_block_copy(is_answer, noise, random)]
    for index, copy in enumerate(copies):
        parts.append(_noisy_part(ids, first_block, copy, first_group=index * num_blocks))
    return _joined(parts)


def pack(rows: Iterable[Tokens], pack_length: int, packs_per_step: int) -> Iterator[Tokens]:
    """Yield batches ``[packs_per_step, pack_length]`` that hold the rows whole, each exactly once.

    Rows are placed longest first into the fullest pack with room; rows without room open the next batch.

    Raises:
        ValueError: A row is longer than a pack.
    """
    waiting: list[Tokens] = []
    num_tokens = 0
    for row in rows:
        if len(row.ids) > pack_length:
            raise ValueError(
                f"a training row of {len(row.ids)} tokens exceeds pack_length ({pack_length}); raise it"
            )
        waiting.append(row)
        num_tokens += len(row.ids)
        if num_tokens >= pack_length * packs_per_step:
            batch, waiting = _fill(waiting, pack_length, packs_per_step)
            num_tokens = sum(len(row.ids) for row in waiting)
            yield batch


def _noisy_part(ids: Ints, first_block: int, copy: NoisyCopy, first_group: int) -> Tokens:
    num_blocks, size = copy.is_masked.shape
    start = first_block * size
    true_ids = ids[start:]
    is_masked = copy.is_masked.reshape(-1)
    block = np.repeat(np.arange(num_blocks, dtype=np.int32), size) + np.int32(first_block)
    group_start = np.repeat(copy.group_starts, size) + np.int32(first_block)
    return Tokens(
        ids=np.where(is_masked, np.int32(MASK_ID), true_ids),
        targets=np.where(is_masked, true_ids, np.int32(-1)),
        positions=np.arange(start, len(ids), dtype=np.int32),
        problem=np.zeros(len(true_ids), dtype=np.int32),
        block=block,
        group=group_start + np.int32(first_group),
        clean_end=group_start,
    )


def _joined(parts: list[Tokens]) -> Tokens:
    return Tokens(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Tokens))
    )


def _fill(waiting: list[Tokens], pack_length: int, num_packs: int) -> tuple[Tokens, list[Tokens]]:
    """Return one batch and the rows that found no room."""
    order = sorted(waiting, key=lambda row: len(row.ids), reverse=True)
    packs: list[list[Tokens]] = [[] for _ in range(num_packs)]
    room = [pack_length] * num_packs
    left: list[Tokens] = []
    for row in order:
        length = len(row.ids)
        fitting = [index for index in range(num_packs) if room[index] >= length]
        if not fitting:
            left.append(row)
            continue
        best = min(fitting, key=room.__getitem__)
        packs[best].append(row)
        room[best] -= length
    shape = (num_packs, pack_length)
    filling = {
        "ids": PAD_ID,
        "targets": -1,
        "positions": 0,
        "problem": -1,
        "block": 0,
        "group": _NO_GROUP,
        "clean_end": 1,
    }
    arrays = {name: np.full(shape, value, dtype=np.int32) for name, value in filling.items()}
    for index, members in enumerate(packs):
        at = 0
        for number, row in enumerate(members):
            end = at + len(row.ids)
            for name, array in arrays.items():
                array[index, at:end] = number if name == "problem" else getattr(row, name)
            at = end
    return Tokens(**arrays), left
