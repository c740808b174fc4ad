from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffulex.moe.router import Router, RouterSpec, choose_experts

SOFTMAX: dict[str, Any] = {"scoring": "softmax", "normalise": True}
SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "normalise": True, "has_bias": True, "in_float32": True}


def slow_choice(logits: list[float], bias: list[float], spec: RouterSpec) -> dict[int, float]:
    """Expert -> weight of one row, number by number."""
    if spec.scoring == "softmax":
        total = sum(math.exp(one - max(logits)) for one in logits)
        scores = [math.exp(one - max(logits)) / total for one in logits]
    else:
        scores = [1 / (1 + math.exp(-one)) for one in logits]
    ranked = [score + more for score, more in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [range(start, start + size) for start in range(0, spec.num_experts, size)]
    best_groups = sorted(groups, key=lambda group: -sum(sorted(ranked[e] for e in group)[-2:]))
    allowed = [expert for group in best_groups[: spec.num_kept_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: spec.num_chosen]
    total = sum(scores[expert] for expert in chosen) if spec.normalise else 1.0
    return {expert: scores[expert] / total * spec.scaling for expert in chosen}


@st.composite
def specs(draw: st.DrawFn) -> RouterSpec:
    num_groups, size = draw(st.sampled_from([(1, 2), (1, 7), (2, 3), (4, 2), (3, 5)]))
    kept = draw(st.integers(1, num_groups))
    return RouterSpec(
        num_experts=num_groups * size,
        num_chosen=draw(st.integers(1, kept * size)),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=draw(st.booleans()),
        num_groups=num_groups,
        num_kept_groups=kept,
        scaling=draw(st.sampled_from([1.0, 2.5])),
        has_bias=draw(st.booleans()),
    )


@settings(max_examples=200)
@given(spec=specs(), seed=st.integers(0, 10**6))
def test_every_kind_chooses_like_the_slow_loop(spec: RouterSpec, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, spec.num_experts, generator=draw) * 2
    bias = torch.randn(spec.num_experts, generator=draw) if spec.has_bias else None
    routing = choose_experts(logits, spec, bias)
    assert routing.expert_ids.dtype == torch.int64
    assert routing.weights.dtype == torch.float32
    added = [0.0] * spec.num_experts if bias is None else bias.tolist()
    for row in range(5):
        expected = slow_choice(logits[row].tolist(), added, spec)
        got = dict(zip(routing.expert_ids[row].tolist(), routing.weights[row].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-5)


def test_softmax_runs_over_all_experts_before_the_choice() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    spec = RouterSpec(num_experts=4, num_chosen=2, scoring="softmax", normalise=False)
    weights = choose_experts(logits, spec).weights
    torch.testing.assert_close(weights, logits.softmax(-1)[:, :2])
    assert float(weights.sum()) < 0.9


def test_a_bias_moves_the_choice_and_leaves_the_weight() -> None:
    spec = RouterSpec(num_experts=3, num_chosen=1, scaling=2.5, **{**SIGMOID, "normalise": False})
    routing = choose_experts(torch.tensor([[3.0, 0.0, 1.0]]), spec, torch.tensor([0.0, 5.0, 0.0]))
    assert routing.expert_ids.tolist() == [[1]]
    assert routing.weights.tolist() == [[1.25]]


def test_experts_of_other_groups_lose_even_to_negative_scores() -> None:
    # Group 0 holds the best two together; its third member is worse than all of group 1.
    spec = RouterSpec(num_experts=6, num_chosen=3, num_groups=2, num_kept_groups=1, **SIGMOID)
    bias = torch.tensor([0.0, 0.0, -3.0, 0.0, 0.0, 0.0])
    routing = choose_experts(torch.tensor([[4.0, 4.0, 0.0, 3.0, 3.0, 3.0]]), spec, bias)
    assert sorted(routing.expert_ids[0].tolist()) == [0, 1, 2]


def test_a_group_is_as_good_as_its_two_best_members_together() -> None:
    spec = RouterSpec(num_experts=6, num_chosen=1, num_groups=2, num_kept_groups=1, **SIGMOID)
    routing = choose_experts(torch.tensor([[5.0, -9.0, -9.0, 1.0, 1.0, -9.0]]), spec, torch.zeros(6))
    assert routing.expert_ids[0, 0] in (3, 4)


def test_a_row_whose_scores_all_vanish_gets_no_weight() -> None:
    spec = RouterSpec(num_experts=4, num_chosen=2, **SIGMOID)
    routing = choose_experts(torch.full((1, 4), -200.0), spec, torch.zeros(4))
    assert routing.weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", [SOFTMAX, SIGMOID])
def test_a_row_that_is_no_number_leaves_the_others_alone(kind: dict[str, Any]) -> None:
    spec = RouterSpec(num_experts=6, num_chosen=2, num_groups=3, num_kept_groups=2, **kind)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(6) if spec.has_bias else None
    clean = choose_experts(logits, spec, bias)
    logits[2] = math.nan
    routing = choose_experts(logits, spec, bias)
    others = [0, 1, 3]
    assert torch.equal(routing.expert_ids[others], clean.expert_ids[others])
    assert torch.equal(routing.weights[others], clean.weights[others])
    assert bool(((routing.expert_ids >= 0) & (routing.expert_ids < 6)).all())
    assert bool(routing.weights[2].isnan().all())


class TestRouter:
    def test_in_float32_the_product_is_not_rounded_to_the_models_type(self) -> None:
        spec = RouterSpec(num_experts=8, num_chosen=3, **SIGMOID)
        router = Router(spec, 16, dtype=torch.bfloat16)
        weight, x = torch.randn(8, 16), torch.randn(5, 16).bfloat16()
        slots = router.weight_slots()
        slots["weight"].load(weight)
        slots["expert_bias"].load(torch.linspace(-1, 1, 8))
        expected = choose_experts(x.float() @ weight.T, spec, torch.linspace(-1, 1, 8))
        torch.testing.assert_close(router(x), expected)

    def test_otherwise_it_runs_in_the_models_type(self) -> None:
        spec = RouterSpec(num_experts=8, num_chosen=3, **SOFTMAX)
        router = Router(spec, 16, dtype=torch.bfloat16)
        weight, x = torch.randn(8, 16).bfloat16(), torch.randn(5, 16).bfloat16()
        assert list(router.weight_slots()) == ["weight"]
        router.weight_slots()["weight"].load(weight)
        torch.testing.assert_close(router(x).weights, choose_experts(x @ weight.T, spec).weights)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"num_experts": 4, "num_chosen": 5}, "a token cannot go to 5 of 4 experts"),
        ({"num_experts": 6, "num_chosen": 1, "num_groups": 4}, "6 experts do not divide into 4 groups"),
        (
            {"num_experts": 6, "num_chosen": 1, "num_groups": 2, "num_kept_groups": 3},
            "3 of 2 groups of experts cannot be kept",
        ),
        (
            {"num_experts": 4, "num_chosen": 1, "num_groups": 4, "num_kept_groups": 2},
            "groups are compared by their 2 best experts, a group has 1",
        ),
        (
            {"num_experts": 8, "num_chosen": 3, "num_groups": 4, "num_kept_groups": 1},
            "1 groups of 2 experts hold less than the 3 that a token goes to",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_named(numbers: dict[str, int], problem: str) -> None:
    assert problem in RouterSpec(**numbers, **SIGMOID).problems()


def test_sound_numbers_have_no_problem() -> None:
    published = RouterSpec(num_experts=256, num_chosen=8, num_groups=8, num_kept_groups=4, **SIGMOID)
    one_each = RouterSpec(num_experts=4, num_chosen=4, num_groups=4, num_kept_groups=4, **SIGMOID)
    assert published.problems() == one_each.problems() == []
