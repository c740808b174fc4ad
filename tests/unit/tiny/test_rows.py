from itertools import islice

import numpy as np
import pytest
import torch

from diffulex_bench.tiny.network import block_visibility, dense_visibility
from diffulex_bench.tiny.noise import multi_block_copy, single_block_copy
from diffulex_bench.tiny.recipe import Noise
from diffulex_bench.tiny.rows import Tokens, pack, training_row
from diffulex_bench.tiny.tokenizer import EOS_ID, MASK_ID

BLOCK = 4
NOISE = Noise(block_size=BLOCK, max_group=3)


def make_row(num_prompt: int, num_answer: int, seed: int = 0) -> Tokens:
    prompt, answer = list(range(10, 10 + num_prompt)), list(range(100, 100 + num_answer))
    return training_row(prompt, answer, NOISE, np.random.default_rng(seed))


def make_answer(num_blocks: int, num_tail: int) -> np.ndarray:
    is_answer = np.ones((num_blocks, BLOCK), dtype=bool)
    is_answer[0, :num_tail] = False
    return is_answer


def seen(row: Tokens) -> np.ndarray:
    """The rule as `noise` states it, one pair of tokens at a time."""
    num = len(row.ids)
    mask = np.zeros((num, num), dtype=bool)
    for q in range(num):
        for k in range(num):
            if row.problem[q] != row.problem[k]:
                continue
            if row.group[q] < 0:
                mask[q, k] = row.group[k] < 0 and row.block[k] <= row.block[q]
            else:
                members = row.group == row.group[q]
                start = row.block[members & (row.problem == row.problem[q])].min()
                if row.group[k] < 0:
                    mask[q, k] = row.block[k] < start
                else:
                    mask[q, k] = row.group[k] == row.group[q] and row.block[k] <= row.block[q]
    return mask


def as_mask(tokens: Tokens) -> torch.Tensor:
    parts = (tokens.problem, tokens.block, tokens.group, tokens.clean_end)
    return dense_visibility(*(torch.from_numpy(np.atleast_2d(part)) for part in parts))[:, 0]


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(3, 9), (4, 3), (9, 14), (1, 1), (6, 17)])
def test_mask_of_a_row_follows_the_stated_visibility_rule(num_prompt: int, num_answer: int):
    for seed in range(5):
        row = make_row(num_prompt, num_answer, seed)
        np.testing.assert_array_equal(as_mask(row)[0].numpy(), seen(row))


def test_packed_problems_never_see_each_other_and_filling_is_seen_by_no_problem():
    rows = [make_row(5, 6, seed) for seed in range(16)]
    batch = next(pack(rows, pack_length=150, packs_per_step=2))
    mask = as_mask(batch).numpy()
    other = batch.problem[:, :, None] != batch.problem[:, None, :]
    assert (batch.problem < 0).any()
    assert not (mask & other).any()
    assert mask.any(axis=-1).all()


def test_block_mask_agrees_with_the_dense_mask():
    batch = next(pack([make_row(5, 6, seed) for seed in range(16)], pack_length=256, packs_per_step=1))
    parts = [torch.from_numpy(getattr(batch, name)) for name in ("problem", "block", "group", "clean_end")]
    block_mask = block_visibility(*parts)
    dense = dense_visibility(*parts)[0, 0]
    index = torch.arange(256)
    rule = block_mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :])
    assert torch.equal(rule, dense)


def test_a_noisy_block_never_sees_its_own_clean_original():
    row = make_row(6, 20, seed=3)
    mask = seen(row)
    for q in np.flatnonzero(row.group >= 0):
        originals = np.flatnonzero((row.group < 0) & (row.positions >= row.block[q] * BLOCK))
        assert not mask[q, originals].any()


def test_prompt_is_never_masked_and_targets_are_the_true_tokens():
    for seed in range(20):
        row = make_row(6, 9, seed)
        text = [*range(10, 16), *range(100, 109), EOS_ID]
        is_masked = row.ids == MASK_ID
        np.testing.assert_array_equal(is_masked, row.targets >= 0)
        assert (row.positions[is_masked] >= 6).all()
        for token, position in zip(row.targets[is_masked], row.positions[is_masked], strict=True):
            assert token == text[position]
        for token, position in zip(row.ids[~is_masked], row.positions[~is_masked], strict=True):
            assert token == text[position]


def test_filling_behind_the_end_is_learned_in_the_last_block_only():
    row = make_row(4, 4)
    assert row.positions.max() == 11
    row = make_row(4, 3)
    assert row.positions.max() == 7


def test_every_block_of_a_single_copy_has_a_mask_and_stands_alone():
    random = np.random.default_rng(0)
    for _ in range(50):
        copy = single_block_copy(make_answer(5, num_tail=3), random)
        assert copy.is_masked.any(axis=1).all()
        assert not copy.is_masked[0, :3].any()
        np.testing.assert_array_equal(copy.group_starts, np.arange(5))


def test_groups_are_consecutive_bounded_and_get_noisier():
    random = np.random.default_rng(0)
    sizes = set()
    for _ in range(200):
        copy = multi_block_copy(make_answer(9, num_tail=0), NOISE, random)
        starts, counts = np.unique(copy.group_starts, return_counts=True)
        assert counts.max() <= NOISE.max_group
        np.testing.assert_array_equal(np.repeat(starts, counts), copy.group_starts)
        np.testing.assert_array_equal(np.cumsum([0, *counts[:-1]]), starts)
        for start, count in zip(starts, counts, strict=True):
            masks = copy.is_masked[start : start + count].sum(axis=1)
            assert (np.diff(masks) >= 0).all()
        sizes.update(counts.tolist())
    assert sizes == {1, 2, 3}


def test_packing_keeps_every_row_whole_and_exactly_once():
    def rows():
        for seed in range(60):
            yield make_row(1 + seed % 9, 1 + seed % 13, seed)

    packed = list(pack(rows(), pack_length=160, packs_per_step=2))
    found = []
    for batch in packed:
        for pack_row in range(2):
            for number in range(batch.problem[pack_row].max() + 1):
                at = np.flatnonzero(batch.problem[pack_row] == number)
                np.testing.assert_array_equal(at, np.arange(at[0], at[-1] + 1))
                found.append(batch.ids[pack_row][at].tobytes())
    originals = [row.ids.tobytes() for row in rows()]
    assert len(packed) > 3
    assert len(found) == len(set(found))
    assert set(found) <= set(originals)
    # Only rows still waiting for the next batch may be missing, and those are the last ones or the longest.
    assert len(originals) - len(found) <= 12


def test_row_longer_than_a_pack_is_refused():
    with pytest.raises(ValueError, match="exceeds pack_length"):
        next(pack(iter([make_row(20, 40)]), pack_length=64, packs_per_step=1))


def test_equal_seeds_give_equal_rows():
    for first, second in islice(((make_row(5, 9, s), make_row(5, 9, s)) for s in range(5)), 5):
        np.testing.assert_array_equal(first.ids, second.ids)
        np.testing.assert_array_equal(first.group, second.group)
