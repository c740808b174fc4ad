"""Random tiny networks with experts against the transformers class that is the same network.

The class gets the mask as a matrix of numbers, our model as visible ends, whole and over pages.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffulex.attention import masks
from tests.support.live_moe import (
    VOCAB,
    llada2_shapes,
    make_llada2,
    make_sdar_moe,
    save_llada2,
    save_sdar_moe,
    sdar_moe_shapes,
)
from tests.support.paged import PagedRun, Part, load

# As for the dense families, more examples in the long profile.
EXAMPLES = max(25, settings.default.max_examples // 4)
PLACES = {
    "seed": st.integers(0, 10**6),
    "length": st.integers(1, 21),
    "block": st.sampled_from([1, 2, 4, 8]),
    "cut": st.integers(0, 4),
    "page_size": st.sampled_from([4, 8, 16, 32]),
}


def compare(reference: Any, model: Any, length: int, block: int, cut: int, page_size: int) -> None:
    """Logits under the block-causal mask, from one forward and from a stored prefix; block 1 is causal."""
    mask = masks.block_causal(length, block)
    ids = torch.randint(0, VOCAB, (length,))
    additive = torch.zeros(1, 1, length, length).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        expected = reference(input_ids=ids[None], attention_mask=additive, use_cache=False).logits[0]
    ends = mask.sum(dim=-1)
    (whole,) = PagedRun(model).logits([Part(0, ids, ends)])
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    border = min(cut * block, (length - 1) // block * block)
    if border > 0:
        run = PagedRun(model, page_size, num_pages=length // page_size + 1)
        run.logits([Part(0, ids[:border], ends[:border], is_stored=True)])
        (rest,) = run.logits([Part(0, ids[border:], ends[border:], start=border)])
        torch.testing.assert_close(rest, expected[border:], atol=1e-4, rtol=1e-4)


@settings(max_examples=EXAMPLES)
@given(shape=sdar_moe_shapes(), **PLACES)
def test_sdar_moe_is_qwen3_moe_under_another_mask(shape: dict[str, Any], seed: int, **places: int) -> None:
    reference = make_sdar_moe(shape, seed)
    with tempfile.TemporaryDirectory() as folder:
        save_sdar_moe(reference, Path(folder))
        model = load(Path(folder), "sdar_moe")
    compare(reference, model, **places)


@settings(max_examples=EXAMPLES)
@given(shape=llada2_shapes(), **PLACES)
def test_llada2_is_glm4_moe_under_another_mask(shape: dict[str, Any], seed: int, **places: int) -> None:
    reference = make_llada2(shape, seed)
    with tempfile.TemporaryDirectory() as folder:
        save_llada2(reference, Path(folder))
        model = load(Path(folder), "llada2_mini")
    compare(reference, model, **places)
