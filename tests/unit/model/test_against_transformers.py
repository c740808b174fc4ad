"""Random tiny networks of every dense family against the transformers class that is the same network.

The class gets the mask as a matrix of numbers, our model as visible ends, whole and over pages.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffulex.attention import masks
from tests.support.live_families import FAMILIES, SHAPES, VOCAB
from tests.support.paged import PagedRun, Part, load


def make_mask(kind: str, length: int, block: int) -> torch.Tensor:
    if kind == "full":
        return masks.full(length)
    if kind == "causal":
        return masks.causal(length)
    if kind == "block_causal":
        return masks.block_causal(length, block)
    return masks.d2f(length, min(5, length), block)


# 12 examples of each family in the short profile, some 400 in the long one.
@settings(max_examples=max(12, settings.default.max_examples // 8))
@given(
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    length=st.integers(1, 21),
    block=st.sampled_from([1, 2, 4, 8]),
    kind=st.sampled_from(["full", "causal", "block_causal", "d2f"]),
    cut=st.integers(0, 4),
    page_size=st.sampled_from([4, 8, 16, 32]),
    num_shards=st.sampled_from([1, 3]),
)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_reference_for_every_mask_whole_and_over_pages(
    name: str,
    shape: dict[str, Any],
    seed: int,
    length: int,
    block: int,
    kind: str,
    cut: int,
    page_size: int,
    num_shards: int,
) -> None:
    family = FAMILIES[name]
    reference = family.make_reference(shape, seed)
    with tempfile.TemporaryDirectory() as folder:
        family.save(reference, Path(folder), num_shards)
        model = load(Path(folder), name)
    mask = make_mask(kind, length, block)
    ids = torch.randint(0, VOCAB, (length,))
    additive = torch.zeros(1, 1, length, length).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        expected = reference(input_ids=ids[None], attention_mask=additive, use_cache=False).logits[0]
    ends = mask.sum(dim=-1)
    (whole,) = PagedRun(model).logits([Part(0, ids, ends)])
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    # Where the mask lets a prefix be computed on its own, it may come from pages.
    border = next((i for i in range(cut * block, 0, -1) if i < length and int(ends[:i].max()) <= i), 0)
    if border > 0:
        run = PagedRun(model, page_size, num_pages=length // page_size + 1)
        run.logits([Part(0, ids[:border], ends[:border], is_stored=True)])
        (rest,) = run.logits([Part(0, ids[border:], ends[border:], start=border)])
        torch.testing.assert_close(rest, expected[border:], atol=1e-4, rtol=1e-4)
