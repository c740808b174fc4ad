from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from diffulex.distributed.state import SINGLE, ParallelState
from diffulex.moe.block import MoeBlock, MoeShape, use_forms
from diffulex.moe.dispatch import DISPATCHERS, dispatch
from diffulex.moe.experts import Experts
from diffulex.moe.ops.grouped_gemm import grouped_gemm
from diffulex.moe.router import RouterSpec, Routing

H, WIDTH = 12, 10
EACH_DISPATCHER = pytest.mark.parametrize("dispatcher", DISPATCHERS)


@pytest.fixture(autouse=True)
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote holds no number."""
    plain = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: plain(*a, **k).fill_(math.nan))


def make_experts(num_experts: int, parallel: ParallelState = SINGLE, *, is_stacked: bool = False) -> Experts:
    """Experts whose weights depend on nothing but their number."""
    experts = Experts(num_experts, H, WIDTH, is_stacked=is_stacked, dtype=torch.float32, parallel=parallel)
    draw = torch.Generator().manual_seed(5)
    weights = {
        f"{expert}.{part}.weight": torch.randn(*shape, generator=draw) * 0.5
        for expert in range(num_experts)
        for part, shape in (("gate_proj", (WIDTH, H)), ("up_proj", (WIDTH, H)), ("down_proj", (H, WIDTH)))
    }
    if is_stacked:
        weights = {
            part: torch.stack([weights[f"{expert}.{part}.weight"] for expert in range(num_experts)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
    slots = experts.weight_slots()
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        assert slot.shape == tuple(weights[name].shape)
        slot.load(weights[name])
    return experts


def slow_sum(experts: Experts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Token by token, choice by choice."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(routing.expert_ids[row], routing.weights[row], strict=True):
            gate, up = experts.gate_up[expert].chunk(2)
            out[row] += weight * (experts.down[expert] @ (silu(gate @ x[row]) * (up @ x[row])))
    return out


def random_routing(num_rows: int, num_experts: int, num_chosen: int, seed: int) -> Routing:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_experts, generator=draw)
    return Routing(scores.topk(num_chosen).indices, torch.rand(num_rows, num_chosen, generator=draw))


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, 40),
    num_experts=st.integers(1, 9),
    num_chosen=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    dispatcher=st.sampled_from(sorted(DISPATCHERS)),
)
def test_the_sum_over_the_chosen_is_that_of_the_slow_loop(
    num_rows: int, num_experts: int, num_chosen: int, seed: int, dispatcher: str
) -> None:
    experts = make_experts(num_experts)
    experts.dispatcher = dispatcher
    routing = random_routing(num_rows, num_experts, min(num_chosen, num_experts), seed)
    x = torch.randn(num_rows, H, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(experts(x, routing), slow_sum(experts, x, routing), atol=1e-5, rtol=1e-5)


@EACH_DISPATCHER
def test_all_rows_may_go_to_one_expert_and_none_to_the_others(dispatcher: str) -> None:
    experts = make_experts(8)
    experts.dispatcher = dispatcher
    x = torch.randn(33, H)
    routing = Routing(torch.full((33, 1), 6), torch.ones(33, 1))
    places = dispatch(routing, 8, dispatcher)
    assert places.group_sizes.tolist() == [0, 0, 0, 0, 0, 0, 33, 0]
    assert places.segments == [(6, 0, 33)]
    torch.testing.assert_close(experts(x, routing), slow_sum(experts, x, routing), atol=1e-5, rtol=1e-5)


@EACH_DISPATCHER
def test_no_rows_give_no_rows(dispatcher: str) -> None:
    experts = make_experts(4)
    experts.dispatcher = dispatcher
    out = experts(torch.empty(0, H), Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)))
    assert out.shape == (0, H)


def test_both_dispatchers_give_every_pair_the_same_place() -> None:
    routing = random_routing(50, 7, 3, seed=1)
    sorted_places = dispatch(routing, 7, "standard")
    looked_up = dispatch(routing, 7, "naive")
    assert torch.equal(sorted_places.pairs, looked_up.pairs)
    assert torch.equal(sorted_places.group_sizes, looked_up.group_sizes)
    experts_in_order = routing.expert_ids.flatten()[sorted_places.pairs].tolist()
    assert experts_in_order == sorted(experts_in_order)
    assert sorted(sorted_places.pairs.tolist()) == list(range(150))


def test_a_dispatcher_between_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of standard, naive within one process, it is 'deepep'"):
        dispatch(random_routing(2, 4, 1, seed=0), 4, "deepep")


def test_an_unknown_product_is_refused() -> None:
    places = dispatch(random_routing(2, 4, 1, seed=0), 4)
    with pytest.raises(ValueError, match="moe_gemm_impl must be one of naive, it is 'cutlass'"):
        grouped_gemm(torch.ones(2, 3), torch.ones(4, 5, 3), places, "cutlass")


def test_weights_of_experts_without_rows_are_not_read() -> None:
    experts = make_experts(4)
    experts.gate_up[2] = math.nan
    x = torch.randn(6, H)
    routing = Routing(torch.tensor([[0, 1], [1, 3]] * 3), torch.ones(6, 2))
    assert bool(experts(x, routing).isfinite().all())


def test_a_row_that_is_no_number_stays_alone() -> None:
    block = make_block()
    x = torch.randn(9, H)
    clean = block(x)
    x[4] = math.nan
    out = block(x)
    others = [row for row in range(9) if row != 4]
    torch.testing.assert_close(out[others], clean[others])
    assert bool(out[4].isnan().all())


def make_block(num_experts: int = 8, dtype: torch.dtype = torch.float32) -> MoeBlock:
    spec = RouterSpec(
        num_experts=num_experts, num_chosen=3, scoring="sigmoid", normalise=True, num_groups=4,
        num_kept_groups=2, scaling=2.5, has_bias=True, in_float32=True,
    )  # fmt: skip
    shape = MoeShape(router=spec, expert_size=WIDTH, sparse_layers=frozenset())
    block = MoeBlock(shape, H, dtype=dtype)
    draw = torch.Generator().manual_seed(3)
    for slot in block.routed_slots().values():
        slot.load(torch.randn(*slot.shape, generator=draw) * 0.5)
    return block


@settings(max_examples=30)
@given(num_rows=st.integers(2, 70), seed=st.integers(0, 10**6))
def test_what_a_row_gets_does_not_depend_on_its_mates(num_rows: int, seed: int) -> None:
    block = make_block()
    x = torch.randn(num_rows, H, generator=torch.Generator().manual_seed(seed))
    together = block(x)
    # A product of one row and one of many add up in another order: the last bits of the largest terms.
    allowed = 1e-6 * float(together.abs().max())
    alone = torch.cat([block(x[row : row + 1]) for row in range(num_rows)])
    torch.testing.assert_close(together, alone, atol=allowed, rtol=0)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(block(x[order]), together[order], atol=allowed, rtol=0)


def test_a_narrow_type_is_rounded_once_behind_the_sum() -> None:
    block = make_block(dtype=torch.bfloat16)
    x = torch.randn(20, H).bfloat16()
    summed = block.experts(x, block.router(x))
    assert summed.dtype == torch.float32
    assert torch.equal(block(x), summed.bfloat16())
    torch.testing.assert_close(block(x).float(), make_block()(x.float()), atol=0.3, rtol=0.05)


def test_shared_experts_see_the_same_input_with_weight_one() -> None:
    block = make_block()
    x = torch.randn(5, H)
    routed = block(x)
    block.shared = torch.nn.Linear(H, H)
    torch.testing.assert_close(block(x), routed + block.shared(x))


def test_stacked_weights_are_those_of_single_experts() -> None:
    single, stacked = make_experts(5), make_experts(5, is_stacked=True)
    assert torch.equal(single.gate_up, stacked.gate_up)
    assert torch.equal(single.down, stacked.down)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_the_shares_of_two_processes_add_up(is_stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffulex.moe.experts.all_reduce", lambda x, _: x)
    x, routing = torch.randn(11, H), random_routing(11, 5, 2, seed=4)
    parts = [make_experts(5, ParallelState(2, rank), is_stacked=is_stacked)(x, routing) for rank in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], make_experts(5)(x, routing), atol=1e-5, rtol=1e-5)


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width of an expert \(10\) must be divisible"):
        Experts(4, H, WIDTH, dtype=torch.float32, parallel=ParallelState(4, 0))


def test_forms_are_set_on_all_experts_of_a_model() -> None:
    model = torch.nn.ModuleList([make_block(), torch.nn.Linear(2, 2), make_block()])
    use_forms(model, "naive", "naive")
    assert [one.dispatcher for one in model.modules() if isinstance(one, Experts)] == ["naive", "naive"]
