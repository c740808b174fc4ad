"""Which positions are filled: all above the threshold, or the best of a block that may be forced."""

from __future__ import annotations

import torch

from diffulex.sampler.accept import accept_confident


def accepted(
    confidences: list[float],
    groups: list[int],
    can_force: list[bool],
    *,
    threshold: float = 0.9,
    scores: list[float] | None = None,
) -> list[int]:
    """The rows that are filled."""
    confidence = torch.tensor(confidences, dtype=torch.float32)
    score = confidence if scores is None else torch.tensor(scores, dtype=torch.float32)
    taken = accept_confident(confidence, score, torch.tensor(groups), torch.tensor(can_force), threshold)
    return taken.nonzero().flatten().tolist()


def test_the_threshold_itself_is_not_enough() -> None:
    above = 0.9 + 1e-7
    assert accepted([0.9, above, 0.89], [0, 0, 0], [False]) == [1]
    assert accepted([0.5, 0.0], [0, 0], [False], threshold=0.5) == []
    assert accepted([1.0], [0], [False], threshold=1.0) == []


def test_threshold_zero_takes_every_position_with_any_probability() -> None:
    assert accepted([0.01, 0.5, 1e-30], [0, 0, 1], [False, False], threshold=0.0) == [0, 1, 2]


def test_a_block_with_a_confident_position_is_not_forced() -> None:
    assert accepted([0.2, 0.95, 0.94, 0.8], [0, 0, 0, 0], [True]) == [1, 2]


def test_a_block_without_one_fills_its_best_if_it_may() -> None:
    assert accepted([0.2, 0.5, 0.4], [0, 0, 0], [True]) == [1]
    assert accepted([0.2, 0.5, 0.4], [0, 0, 0], [False]) == []


def test_of_equal_positions_the_first_is_forced() -> None:
    assert accepted([0.1, 0.6, 0.6, 0.6], [0, 0, 0, 0], [True]) == [1]
    assert accepted([0.0, 0.0], [0, 0], [True]) == [0]


def test_blocks_decide_for_themselves() -> None:
    confidences = [0.3, 0.4, 0.95, 0.1, 0.2, 0.7, 0.6]
    groups = [0, 0, 1, 1, 2, 3, 3]
    assert accepted(confidences, groups, [True, True, False, True]) == [1, 2, 5]


def test_blocks_without_rows_change_nothing() -> None:
    assert accepted([0.3, 0.2], [1, 3], [True, True, True, True, True]) == [0, 1]


def test_the_score_ranks_and_the_confidence_passes() -> None:
    assert accepted([0.3, 0.5], [0, 0], [True], scores=[0.2, 0.1]) == [0]
    assert accepted([0.95, 0.5], [0, 0], [True], scores=[0.0, 0.1]) == [0]


def test_negative_scores_rank_too() -> None:
    assert accepted([0.3, 0.5, 0.4], [0, 0, 0], [True], scores=[-2.0, -1.5, -1.0]) == [2]


def test_nan_in_one_block_leaves_the_others_alone() -> None:
    nan = float("nan")
    assert accepted([nan, 0.5, 0.3, 0.4], [0, 0, 1, 1], [True, True]) == [3]
