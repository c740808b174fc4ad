"""Forms of norm, rotation and loading that families with experts brought along."""

from __future__ import annotations

import pytest
import torch

from diffulex.layer.norm import RMSNorm
from diffulex.layer.rotary import RotaryEmbedding, rotate
from diffulex.layer.weights import WeightSlot, joined

BF16 = torch.bfloat16


def make_norm(dtype: torch.dtype, *, rounds_before_weight: bool) -> RMSNorm:
    norm = RMSNorm(64, 1e-6, dtype=dtype, rounds_before_weight=rounds_before_weight)
    norm.weight.copy_(torch.linspace(0.3, 1.7, 64))
    return norm


def test_a_norm_may_round_before_the_weight_and_again_behind_it() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    wide = x.float()
    plain = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    twice, once = (make_norm(BF16, rounds_before_weight=order) for order in (True, False))
    assert torch.equal(twice(x), plain.to(BF16) * twice.weight)
    assert torch.equal(once(x), (plain * once.weight.float()).to(BF16))
    assert not torch.equal(twice(x), once(x))


def test_the_order_of_rounding_is_no_matter_in_float32() -> None:
    x = torch.randn(5, 64)
    both = [make_norm(torch.float32, rounds_before_weight=order)(x) for order in (True, False)]
    assert torch.equal(*both)


@pytest.mark.parametrize("rotary_dim", [2, 6, 12])
def test_dimensions_behind_the_rotary_ones_stay_as_they_are(rotary_dim: int) -> None:
    x = torch.randn(7, 3, 12)
    rotation = RotaryEmbedding(rotary_dim, 1e4).rotation(torch.arange(7) + 5, torch.float32)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])
    half = rotary_dim // 2
    # The denominator of the frequencies is the rotary width, not that of the head.
    angles = (torch.arange(7) + 5)[:, None, None] * 1e4 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:rotary_dim]
    expected = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
    torch.testing.assert_close(turned[..., :rotary_dim], expected, atol=1e-5, rtol=1e-5)


def test_each_part_of_a_joined_tensor_takes_its_own_share() -> None:
    whole = torch.arange(24.0).view(12, 2)
    target = torch.zeros(6, 2)
    parts = [
        WeightSlot(target[:4], (8, 2), start=4),
        WeightSlot(target[4:5], (2, 2), start=1),
        WeightSlot(target[5:], (2, 2), start=0),
    ]
    slot = joined(target, parts)
    assert slot.shape == (12, 2)
    slot.load(whole)
    assert torch.equal(target, whole[[4, 5, 6, 7, 9, 10]])
