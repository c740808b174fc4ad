"""Pieces of some families only: proportional rotation, norms without a weight, gelu, mean embeddings."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu

from diffulex.distributed.state import ParallelState
from diffulex.layer import embedding
from diffulex.layer.activation import gelu_tanh_and_multiply
from diffulex.layer.embedding import VocabEmbedding
from diffulex.layer.norm import plain_rms_norm
from diffulex.layer.rotary import RotaryEmbedding, rotate


@pytest.mark.parametrize("num_frequencies", [0, 1, 3, 4])
def test_only_the_first_elements_of_both_halves_are_rotated(num_frequencies: int) -> None:
    rotary = RotaryEmbedding(8, 100.0, num_frequencies)
    x = torch.randn(2, 3, 8)
    turned = rotate(x, rotary.rotation(torch.tensor([5, 9]), torch.float32))
    is_turned = [i % 4 < num_frequencies for i in range(8)]
    assert ((turned - x).abs().amax(dim=(0, 1)) > 1e-4).tolist() == is_turned
    # The head width stays the denominator of the exponents, however few frequencies turn.
    whole = rotate(x, RotaryEmbedding(8, 100.0).rotation(torch.tensor([5, 9]), torch.float32))
    assert torch.equal(turned[..., is_turned], whole[..., is_turned])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_a_weight_gives_rows_of_mean_square_one(dtype: torch.dtype) -> None:
    out = plain_rms_norm(torch.randn(3, 2, 64).to(dtype) * 7, 1e-6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float().pow(2).mean(-1), torch.ones(3, 2), atol=1e-2, rtol=0)
    assert torch.equal(plain_rms_norm(torch.zeros(1, 4, dtype=dtype), 1e-6), torch.zeros(1, 4, dtype=dtype))


def test_the_gate_is_the_tanh_form_of_gelu_before_up() -> None:
    gate_up = torch.randn(3, 8)
    expected = gelu(gate_up[:, :4], approximate="tanh") * gate_up[:, 4:]
    torch.testing.assert_close(gelu_tanh_and_multiply(gate_up), expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_mean_embeddings_of_all_ranks_add_up_to_the_product(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 ids do not divide: the last rank holds fewer rows and padding."""
    monkeypatch.setattr(embedding, "all_reduce", lambda x, _: x)
    weight, probs = torch.randn(11, 4), torch.randn(2, 11).softmax(-1)
    total = torch.zeros(2, 4)
    for rank in range(size):
        layer = VocabEmbedding(11, 4, dtype=torch.float32, parallel=ParallelState(size, rank))
        layer.weight_slots()["weight"].load(weight)
        total += layer.mean(probs)
    torch.testing.assert_close(total, probs @ weight)
