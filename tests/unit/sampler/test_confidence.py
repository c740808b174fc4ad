"""Which token wins a row, and how sure it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from diffulex.sampler import FillSampler, SamplerInput
from diffulex.sampler.confidence import choose_tokens
from diffulex.sampling_params import FORCE_SCORES

NEG = float("-inf")


def inputs(num_rows: int, **changes: Any) -> SamplerInput:
    """Greedy rows, each a block of its own; id 0 is the mask, ids from 6 on are padding."""
    plain: dict[str, Any] = {
        "groups_N": torch.arange(num_rows),
        "can_force_G": torch.zeros(num_rows, dtype=torch.bool),
        "accept_threshold": 0.9,
        "banned_id": 0,
        "vocab_limit": 6,
    }
    return SamplerInput(**{**plain, **changes})


def drawing(num_rows: int, *, temperature: float = 1.0, **changes: Any) -> SamplerInput:
    """Rows that all draw with the same settings."""
    plain: dict[str, Any] = {
        "temperature_N": torch.full((num_rows,), temperature),
        "top_p_N": torch.ones(num_rows),
        "top_k_N": torch.zeros(num_rows, dtype=torch.int64),
        "uniform_N": torch.full((num_rows,), 0.5, dtype=torch.float64),
        "force_score_N": torch.zeros(num_rows, dtype=torch.int64),
    }
    return inputs(num_rows, **{**plain, **changes})


def test_of_equal_logits_the_lowest_id_wins() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 3.0, 3.0, 0.0], [7.0, 7.0, 7.0, 7.0, 7.0, 7.0]])
    token, _, _ = choose_tokens(logits, inputs(2))
    assert token.tolist() == [2, 1]


def test_the_mask_id_never_wins_but_counts_in_the_confidence() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0, 8.0, 0.0, 0.0]])
    token, confidence, score = choose_tokens(logits, inputs(1))
    assert token.tolist() == [3]
    assert confidence.item() == pytest.approx(math.exp(8) / (math.exp(9) + math.exp(8) + 4), rel=1e-5)
    assert score.item() == confidence.item()


def test_ids_behind_the_tokenizer_never_win_but_count_in_the_confidence() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 50.0, 2.0]])
    token, confidence, _ = choose_tokens(logits, inputs(1))
    assert token.tolist() == [5]
    assert confidence.item() == pytest.approx(math.exp(-48), rel=1e-4)


def test_the_last_id_of_the_tokenizer_may_win() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5], logits[0, 6] = 4.0, 5.0
    assert choose_tokens(logits, inputs(1))[0].tolist() == [5]


def test_confidence_is_float32_whatever_the_model_computes_in() -> None:
    logits = (torch.randn(40, 6, generator=torch.Generator().manual_seed(3)) * 4).bfloat16()
    token, confidence, _ = choose_tokens(logits, inputs(40))
    exact = logits.double().softmax(-1).gather(1, token[:, None])[:, 0]
    assert confidence.dtype == torch.float32
    # Rounding of one float32 softmax; bfloat16 would be off by up to 4e-3.
    assert (confidence.double() - exact).abs().max() < 1e-6


def test_the_logits_of_the_caller_stay_as_they_are() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    choose_tokens(logits, drawing(3))
    assert torch.equal(logits, before)


def test_a_row_that_is_not_finite_has_nan_confidence_and_harms_no_other_row() -> None:
    logits = torch.tensor(
        [
            [0.0, 4.0, 0.0, 0.0, 0.0, 0.0],
            [float("nan")] * 6,
            [0.0, float("inf"), 0, 0, 0, 0],
            [1, NEG, 0, 2, 0, 0],
        ]
    )
    alone = choose_tokens(logits[[0, 3]], inputs(2))
    for sampler_input in (inputs(4), drawing(4, temperature=0.0), drawing(4, temperature=0.7)):
        token, confidence, _ = choose_tokens(logits, sampler_input)
        assert confidence.isnan().tolist() == [False, True, True, False]
        if sampler_input.temperature_N is None or not sampler_input.temperature_N.any():
            assert token[[0, 3]].tolist() == alone[0].tolist()
            assert confidence[[0, 3]].tolist() == alone[1].tolist()


def test_a_row_without_any_id_to_choose_has_nan_confidence() -> None:
    logits = torch.full((1, 8), NEG)
    logits[0, 0] = logits[0, 7] = 1.0
    _, confidence, _ = choose_tokens(logits, inputs(1))
    assert confidence.isnan().all()


def test_margin_and_entropy_rank_positions_by_their_own_formula() -> None:
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(8)) * 2
    prob = logits.double().softmax(-1)
    top = prob.sort(dim=-1, descending=True).values
    wanted = {
        "prob": choose_tokens(logits, inputs(5))[1].double(),
        "margin": top[:, 0] - top[:, 1],
        "neg_entropy": (prob * (prob + 1e-10).log()).sum(-1),
    }
    for kind in FORCE_SCORES:
        index = torch.full((5,), FORCE_SCORES.index(kind))
        _, confidence, score = choose_tokens(logits, drawing(5, temperature=0.0, force_score_N=index))
        assert torch.allclose(score.double(), wanted[kind], atol=1e-6)
        assert torch.allclose(confidence.double(), wanted["prob"], atol=1e-6)


def test_rows_of_one_batch_may_rank_by_different_scores() -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(5))
    mixed = drawing(3, temperature=0.0, force_score_N=torch.tensor([2, 0, 1]))
    _, _, score = choose_tokens(logits, mixed)
    single = [
        choose_tokens(logits[i : i + 1], drawing(1, temperature=0.0, force_score_N=torch.tensor([kind])))[2]
        for i, kind in enumerate((2, 0, 1))
    ]
    assert torch.allclose(score, torch.cat(single))


# Block of two positions. Position 0 has the higher probability, position 1 the higher margin and the lower
# entropy: 0 puts the rest on one rival, 1 spreads it over many.
RIVALS = torch.tensor([[0.5, 0.45, 0.01, 0.01, 0.01, 0.02], [0.03, 0.48, 0.15, 0.12, 0.11, 0.11]]).log()
RIVALS = RIVALS[:, [2, 0, 1, 3, 4, 5]]


@pytest.mark.parametrize(("kind", "position"), [("prob", 0), ("margin", 1)])
def test_the_forced_position_is_the_best_by_the_chosen_score(kind: str, position: int) -> None:
    index = torch.full((2,), FORCE_SCORES.index(kind))
    block = {"groups_N": torch.zeros(2, dtype=torch.int64), "can_force_G": torch.tensor([True])}
    output = FillSampler()(RIVALS, drawing(2, temperature=0.0, force_score_N=index, **block))
    assert output.accepted_N.tolist() == [position == 0, position == 1]


@pytest.mark.parametrize("kind", FORCE_SCORES)
def test_the_threshold_compares_probability_whatever_ranks(kind: str) -> None:
    logits = torch.tensor([[0.0, 6.0, 0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    index = torch.full((2,), FORCE_SCORES.index(kind))
    output = FillSampler()(logits, drawing(2, temperature=0.0, force_score_N=index))
    assert output.accepted_N.tolist() == [True, False]


def test_acceptance_follows_the_drawn_token_and_not_the_best() -> None:
    logits = torch.tensor([[NEG, 5.0, 0.0, NEG, NEG, NEG]]).repeat(2, 1)
    uniform = torch.tensor([0.0, 0.9999], dtype=torch.float64)
    output = FillSampler()(logits, drawing(2, temperature=1.0, uniform_N=uniform))
    assert output.token_N.tolist() == [1, 2]
    assert output.accepted_N.tolist() == [True, False]
    assert output.confidence_N[1].item() == pytest.approx(1 / (1 + math.exp(5)), rel=1e-4)
