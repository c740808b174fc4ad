"""Draws at a temperature: the distribution is checked by counting over an even grid of uniform numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffulex.sampler.confidence import choose_tokens, draw_tokens
from tests.unit.sampler.test_confidence import drawing, inputs

ROW = torch.tensor([9.0, 1.0, 2.5, 0.0, 2.0, -1.0, 8.0])
NUM_DRAWS = 4000
GRID = (torch.arange(NUM_DRAWS, dtype=torch.float64) + 0.5) / NUM_DRAWS


def shares(**settings: Any) -> torch.Tensor:
    """How often each id is drawn when the uniform numbers are spread evenly."""
    logits = ROW.repeat(NUM_DRAWS, 1)
    token, _, _ = choose_tokens(logits, drawing(NUM_DRAWS, uniform_N=GRID, **settings))
    return torch.bincount(token, minlength=len(ROW)) / NUM_DRAWS


def probabilities(temperature: float, keep: list[int]) -> torch.Tensor:
    """softmax(logits / temperature) over the ids in `keep` alone."""
    result = torch.zeros(len(ROW), dtype=torch.float64)
    result[keep] = (ROW[keep].double() / temperature).softmax(-1)
    return result


def each(number: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((NUM_DRAWS,), number, dtype=dtype)


# With an even grid each count is off by less than one draw.
EXACT = 1.01 / NUM_DRAWS


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_are_drawn_in_proportion_to_the_heated_softmax(temperature: float) -> None:
    wanted = probabilities(temperature, [1, 2, 3, 4, 5])
    assert (shares(temperature=temperature) - wanted).abs().max() < EXACT


def test_top_k_keeps_that_many_best_ids() -> None:
    wanted = probabilities(1.0, [2, 4])
    assert (shares(top_k_N=each(2, torch.int64)) - wanted).abs().max() < EXACT


def test_top_k_of_one_is_the_argmax_at_any_temperature() -> None:
    assert shares(temperature=5.0, top_k_N=each(1, torch.int64)).tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert torch.equal(shares(top_k_N=each(100, torch.int64)), shares())


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    first, second = probabilities(1.0, [1, 2, 3, 4, 5])[[2, 4]].tolist()
    # A hair beyond the best token alone: the second one crosses the bound and stays.
    wanted = probabilities(1.0, [2, 4])
    assert (shares(top_p_N=each(first + 1e-4)) - wanted).abs().max() < EXACT
    assert (shares(top_p_N=each(first + second - 1e-4)) - wanted).abs().max() < EXACT
    assert shares(top_p_N=each(first - 1e-4)).tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert shares(top_p_N=each(1e-6)).tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_top_p_works_on_what_top_k_left() -> None:
    first, second = probabilities(1.0, [2, 4]).tolist()[2], probabilities(1.0, [1, 2, 3, 4, 5])[2].item()
    assert first > second
    between = (first + second) / 2
    both = shares(top_k_N=each(2, torch.int64), top_p_N=each(between))
    assert both.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert (shares(top_p_N=each(between)) - probabilities(1.0, [2, 4])).abs().max() < EXACT


def test_temperature_counts_before_top_p() -> None:
    hot = probabilities(3.0, [1, 2, 3, 4, 5])
    bound = hot[[2, 4]].sum().item() + 1e-4
    wanted = probabilities(3.0, [1, 2, 4])
    assert (shares(temperature=3.0, top_p_N=each(bound)) - wanted).abs().max() < EXACT


def test_equal_ids_are_cut_highest_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 0.0, 0.0]]).repeat(300, 1)
    grid = (torch.arange(300, dtype=torch.float64) + 0.5) / 300
    settings = drawing(300, uniform_N=grid, top_k_N=torch.full((300,), 2))
    assert sorted(set(draw_tokens_of(logits, settings))) == [1, 2]


def draw_tokens_of(logits: torch.Tensor, settings: Any) -> list[int]:
    result: list[int] = choose_tokens(logits, settings)[0].tolist()
    return result


def test_the_ends_of_the_interval_draw_allowed_ids() -> None:
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for temperature in (0.05, 1.0, 100.0):
        settings = drawing(2, temperature=temperature, uniform_N=ends)
        first, last = draw_tokens_of(ROW.repeat(2, 1), settings)
        assert first == 2
        assert last in {1, 2, 3, 4, 5}


def test_a_draw_on_the_border_of_two_ids_takes_the_second() -> None:
    even = torch.tensor([[float("-inf"), 3.0, 3.0, float("-inf")]]).repeat(2, 1)
    below = drawing(2, vocab_limit=4, uniform_N=torch.tensor([0.5 - 2**-53, 0.5], dtype=torch.float64))
    assert draw_tokens_of(even, below) == [1, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-37, 1e-43])
def test_a_temperature_close_to_zero_is_the_argmax(temperature: float) -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(2)) * 30
    greedy = draw_tokens_of(logits, inputs(50))
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert draw_tokens_of(logits, drawing(50, temperature=temperature, uniform_N=uniform)) == greedy


def test_temperature_zero_ignores_the_draw_and_the_cuts() -> None:
    logits = torch.randn(60, 7, generator=torch.Generator().manual_seed(6))
    greedy = choose_tokens(logits, inputs(60))
    settings = drawing(
        60, temperature=0.0, uniform_N=torch.linspace(0, 0.999, 60).double(), top_k_N=torch.full((60,), 3)
    )
    drawn = choose_tokens(logits, settings)
    assert torch.equal(drawn[0], greedy[0])
    assert torch.equal(drawn[1], greedy[1])


@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0])
def test_confidence_is_taken_at_temperature_one(temperature: float) -> None:
    logits = torch.randn(80, 6, generator=torch.Generator().manual_seed(9)) * 3
    uniform = torch.rand(80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    settings = drawing(80, temperature=temperature, uniform_N=uniform, top_k_N=torch.full((80,), 4))
    token, confidence, _ = choose_tokens(logits, settings)
    plain = logits.softmax(-1).gather(1, token[:, None])[:, 0]
    assert torch.allclose(confidence, plain, atol=1e-6)
    assert (token != choose_tokens(logits, inputs(80))[0]).any() or temperature == 0.1


def test_a_row_draws_the_same_whatever_rows_stand_beside_it() -> None:
    draw = torch.Generator().manual_seed(12)
    logits = torch.randn(30, 6, generator=draw) * 2
    settings = drawing(
        30,
        temperature_N=torch.rand(30, generator=draw) * 2,
        top_p_N=torch.rand(30, generator=draw) * 0.9 + 0.1,
        top_k_N=torch.randint(0, 5, (30,), generator=draw),
        uniform_N=torch.rand(30, generator=draw, dtype=torch.float64),
    )
    together = choose_tokens(logits, settings)
    for row in range(30):
        one = slice(row, row + 1)
        names = ("temperature_N", "top_p_N", "top_k_N", "uniform_N")
        alone = choose_tokens(
            logits[one], drawing(1, **{name: getattr(settings, name)[one] for name in names})
        )
        assert alone[0].item() == together[0][row].item()
        assert alone[1].item() == pytest.approx(together[1][row].item(), abs=1e-7)


def test_a_draw_without_all_its_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match="temperature, top_p, top_k and a uniform number"):
        draw_tokens(torch.zeros(2, 6), drawing(2, uniform_N=None))
