from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from diffulex.distributed.state import ParallelState
from diffulex.layer.embedding import OutputHead
from diffulex.layer.linear import MergedColumnLinear, QKVLinear, RowLinear
from diffulex.layer.lora import LoraPair
from diffulex.layer.weights import WeightSlot, joined

F32 = torch.float32
RANKS = [(1, 0), (2, 0), (2, 1), (4, 3)]


def fill(slots: dict[str, WeightSlot]) -> dict[str, torch.Tensor]:
    """Random tensors in every slot, as a checkpoint holds them."""
    tensors = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    for name, slot in slots.items():
        slot.load(tensors[name])
    return tensors


def make_pair(shape: tuple[int, ...], rank: int = 2, scale: float = 0.7) -> LoraPair:
    return LoraPair(torch.randn(rank, shape[1]), torch.randn(shape[0], rank), scale)


def test_a_merged_weight_is_the_sum_in_float32() -> None:
    pair = LoraPair(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [5.0]]), 0.5)
    weight = torch.tensor([[1.0, 1.0], [0.0, 2.0]], dtype=torch.bfloat16)
    merged = pair.merged_into(weight)
    assert merged.dtype == F32
    assert merged.tolist() == [[2.5, 4.0], [2.5, 7.0]]
    assert weight.tolist() == [[1.0, 1.0], [0.0, 2.0]]


@pytest.mark.parametrize(("size", "rank"), RANKS)
@pytest.mark.parametrize("adapted", [("gate", "up"), ("up",)])
def test_parts_of_a_fused_layer_have_adapters_of_their_own(
    size: int, rank: int, adapted: tuple[str, ...]
) -> None:
    layer = MergedColumnLinear(
        6, {"gate": 8, "up": 4}, bias=True, dtype=F32, parallel=ParallelState(size, rank)
    )
    slots = layer.weight_slots()
    tensors = fill(slots)
    for number, part in enumerate(adapted):
        pair = make_pair(slots[f"{part}.weight"].shape, rank=2 + number)
        pair.attach(slots[f"{part}.weight"])
        tensors[f"{part}.weight"] = pair.merged_into(tensors[f"{part}.weight"])
    x = torch.randn(5, 6)
    parts = [F.linear(x, tensors[f"{p}.weight"], tensors[f"{p}.bias"]) for p in ("gate", "up")]
    expected = torch.cat([part.chunk(size, dim=-1)[rank] for part in parts], dim=-1)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_the_base_stays_as_it_is_beside_an_adapter() -> None:
    layer = QKVLinear(6, 4, 2, 3, dtype=F32)
    slots = layer.weight_slots()
    fill(slots)
    before = layer.weight.clone()
    make_pair(slots["k.weight"].shape).attach(slots["k.weight"])
    layer(torch.randn(3, 6))
    assert torch.equal(layer.weight, before)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_a_divided_input_divides_a_and_the_ranks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffulex.layer.linear.all_reduce", lambda x, _: x)
    tensors = {"weight": torch.randn(3, 8), "bias": torch.randn(3)}
    pair, x, total = make_pair((3, 8)), torch.randn(5, 8), torch.zeros(5, 3)
    for rank in range(2):
        layer = RowLinear(8, 3, bias=True, dtype=F32, parallel=ParallelState(2, rank))
        slots = layer.weight_slots()
        for name, slot in slots.items():
            slot.load(tensors[name])
        pair.attach(slots["weight"])
        assert layer.lora is not None
        assert layer.lora.a.shape == (2, 4)
        total += layer(x.chunk(2, dim=-1)[rank])
    expected = F.linear(x, pair.merged_into(tensors["weight"]), tensors["bias"])
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_head_has_its_adapter_on_the_rows_of_each_rank(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows: with two and four ranks the last one is padded."""
    monkeypatch.setattr("diffulex.layer.embedding.all_gather_last", lambda x, _: x)
    weight, pair, hidden = torch.randn(7, 3), make_pair((7, 3)), torch.randn(2, 3)
    logits = []
    for rank in range(size):
        head = OutputHead(7, 3, dtype=F32, parallel=ParallelState(size, rank))
        slot = head.weight_slots()["weight"]
        slot.load(weight)
        pair.attach(slot)
        logits.append(head(hidden))
    expected = hidden @ pair.merged_into(weight).T
    torch.testing.assert_close(torch.cat(logits, dim=-1)[:, :7], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_one_adapter_of_a_tensor_with_several_parts_reaches_them_all(size: int, rank: int) -> None:
    layer = QKVLinear(6, 4, 2, 3, dtype=F32, parallel=ParallelState(size, rank))
    slots = layer.weight_slots()
    parts = [slots[f"{name}.weight"] for name in "qkv"]
    slot = joined(layer.weight.data, parts)
    assert slot.takes_adapter
    weight, pair, x = torch.randn(24, 6), make_pair((24, 6)), torch.randn(5, 6)
    slot.load(weight)
    pair.attach(slot)
    whole = F.linear(x, pair.merged_into(weight)).split([12, 6, 6], dim=-1)
    expected = torch.cat([part.chunk(size, dim=-1)[rank] for part in whole], dim=-1)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_takes_the_type_of_the_weight() -> None:
    layer = RowLinear(8, 3, dtype=torch.bfloat16)
    slots = layer.weight_slots()
    fill(slots)
    make_pair((3, 8)).attach(slots["weight"])
    assert layer.lora is not None
    assert layer.lora.a.dtype == layer.lora.b.dtype == torch.bfloat16
    assert layer(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_place_without_a_linear_layer_says_that_it_takes_none() -> None:
    assert not WeightSlot(torch.zeros(2, 3), (2, 3)).takes_adapter
    assert not joined(torch.zeros(2, 3), [WeightSlot(torch.zeros(2, 3), (2, 3))]).takes_adapter
