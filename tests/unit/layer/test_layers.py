from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from diffulex.distributed.state import ParallelState
from diffulex.layer.activation import silu_and_multiply
from diffulex.layer.embedding import OutputHead, VocabEmbedding
from diffulex.layer.linear import MergedColumnLinear, QKVLinear, RowLinear
from diffulex.layer.norm import RMSNorm
from diffulex.layer.rotary import RotaryEmbedding, rotate
from diffulex.layer.weights import WeightSlot, prefixed

F32 = torch.float32
RANKS = [(1, 0), (2, 0), (2, 1), (4, 3)]


def fill(slots: dict[str, WeightSlot]) -> dict[str, torch.Tensor]:
    """Random tensors in every slot, as a checkpoint holds them."""
    tensors = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    for name, slot in slots.items():
        slot.load(tensors[name])
    return tensors


class TestLinears:
    @pytest.mark.parametrize(("size", "rank"), RANKS)
    @pytest.mark.parametrize("bias", [True, False])
    def test_fused_projections_give_each_rank_its_part_of_each(
        self, size: int, rank: int, bias: bool
    ) -> None:
        layer = MergedColumnLinear(
            6, {"gate": 8, "up": 4}, bias=bias, dtype=F32, parallel=ParallelState(size, rank)
        )
        slots = layer.weight_slots()
        assert {name: slot.shape for name, slot in slots.items() if "weight" in name} == {
            "gate.weight": (8, 6),
            "up.weight": (4, 6),
        }
        assert ("gate.bias" in slots) == bias
        tensors = fill(slots)
        x = torch.randn(5, 6)
        parts = [F.linear(x, tensors[f"{p}.weight"], tensors.get(f"{p}.bias")) for p in ("gate", "up")]
        expected = torch.cat([part.chunk(size, dim=-1)[rank] for part in parts], dim=-1)
        torch.testing.assert_close(layer(x), expected)

    @pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
    def test_queries_keys_and_values_are_divided_by_heads(self, size: int, rank: int) -> None:
        layer = QKVLinear(6, 4, 2, 3, dtype=F32, parallel=ParallelState(size, rank))
        assert (layer.num_heads, layer.num_kv_heads) == (4 // size, 2 // size)
        tensors = fill(layer.weight_slots())
        x = torch.randn(5, 6)
        heads = layer(x).view(5, -1, 3)
        q, k, v = (F.linear(x, tensors[f"{p}.weight"]).view(5, -1, 3).chunk(size, dim=1)[rank] for p in "qkv")
        torch.testing.assert_close(heads, torch.cat([q, k, v], dim=1))

    def test_partial_products_of_all_ranks_add_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("diffulex.layer.linear.all_reduce", lambda x, _: x)
        whole = RowLinear(8, 3, bias=True, dtype=F32)
        tensors = fill(whole.weight_slots())
        x = torch.randn(5, 8)
        total = torch.zeros(5, 3)
        for rank in range(2):
            layer = RowLinear(8, 3, bias=True, dtype=F32, parallel=ParallelState(2, rank))
            for name, slot in layer.weight_slots().items():
                assert slot.shape == whole.weight_slots()[name].shape
                slot.load(tensors[name])
            total += layer(x.chunk(2, dim=-1)[rank])
        torch.testing.assert_close(total, F.linear(x, tensors["weight"], tensors["bias"]))
        torch.testing.assert_close(whole(x), total)

    def test_widths_that_do_not_divide_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"number of key/value heads \(3\) must be divisible .* \(2\)"):
            QKVLinear(6, 6, 3, 2, dtype=F32, parallel=ParallelState(2, 0))
        with pytest.raises(ValueError, match=r"width of gate \(5\)"):
            MergedColumnLinear(6, {"gate": 5}, dtype=F32, parallel=ParallelState(2, 0))


class TestVocabulary:
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_rows_of_all_ranks_make_the_embedding_and_the_logits(
        self, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("diffulex.layer.embedding.all_reduce", lambda x, _: x)
        monkeypatch.setattr("diffulex.layer.embedding.all_gather_last", lambda x, _: x)
        matrix, ids, hidden = torch.randn(8, 3), torch.tensor([7, 0, 3, 3]), torch.randn(2, 3)
        embedded, logits = torch.zeros(4, 3), []
        for rank in range(size):
            embedding = VocabEmbedding(8, 3, dtype=F32, parallel=ParallelState(size, rank))
            head = OutputHead(8, 3, dtype=F32, parallel=ParallelState(size, rank))
            assert embedding.weight_slots()["weight"].shape == (8, 3)
            embedding.weight_slots()["weight"].load(matrix)
            head.weight_slots()["weight"].load(matrix)
            embedded += embedding(ids)
            logits.append(head(hidden))
        assert torch.equal(embedded, matrix[ids])
        torch.testing.assert_close(torch.cat(logits, dim=-1), hidden @ matrix.T)

    def test_a_tied_head_is_the_embedding(self) -> None:
        embedding, head = VocabEmbedding(8, 3, dtype=F32), OutputHead(8, 3, dtype=F32)
        head.tie(embedding)
        embedding.weight_slots()["weight"].load(torch.randn(8, 3))
        torch.testing.assert_close(head(torch.eye(3)), embedding.weight.T)
        assert head.weight.data_ptr() == embedding.weight.data_ptr()


class TestNormAndActivation:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rms_norm_works_in_float32_and_rounds_once(self, dtype: torch.dtype) -> None:
        norm = RMSNorm(6, 0.5, dtype=dtype)
        weight = torch.randn(6).to(dtype)
        norm.weight_slots()["weight"].load(weight)
        x = (torch.randn(3, 2, 6) * 3).to(dtype)
        wide = x.double()
        expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.5).sqrt() * weight.double()
        out = norm(x)
        assert out.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)

    def test_gate_comes_before_up(self) -> None:
        gate, up = torch.randn(2, 3, 4)
        expected = gate / (1 + (-gate).exp()) * up
        torch.testing.assert_close(silu_and_multiply(torch.cat([gate, up], dim=-1)), expected)


class TestRotary:
    def test_halves_are_rotated_by_the_angle_of_their_frequency(self) -> None:
        rotary = RotaryEmbedding(4, theta=100.0)
        x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        out = rotate(x, rotary.rotation(torch.tensor([3]), F32))[0, 0].tolist()
        for pair, frequency in enumerate((1.0, 0.1)):
            cos, sin = math.cos(3 * frequency), math.sin(3 * frequency)
            first, second = x[0, 0, pair].item(), x[0, 0, pair + 2].item()
            assert out[pair] == pytest.approx(first * cos - second * sin, abs=1e-6)
            assert out[pair + 2] == pytest.approx(second * cos + first * sin, abs=1e-6)

    def test_scores_depend_on_distance_only(self) -> None:
        rotary = RotaryEmbedding(16, theta=10000.0)
        query, key = torch.randn(2, 1, 2, 16)

        def score(query_at: int, key_at: int) -> torch.Tensor:
            turned_query = rotate(query, rotary.rotation(torch.tensor([query_at]), F32))
            turned_key = rotate(key, rotary.rotation(torch.tensor([key_at]), F32))
            return (turned_query * turned_key).sum(-1)

        torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=0)
        assert not torch.allclose(score(9, 4), score(4, 9), atol=1e-3)

    def test_angles_are_float32_and_results_have_the_asked_type(self) -> None:
        rotation = RotaryEmbedding(8, theta=1e6).rotation(torch.tensor([30000]), torch.bfloat16)
        assert rotation.cos.dtype == rotation.signed_sin.dtype == torch.bfloat16
        exact = math.cos(30000 * 1e6 ** (-2 / 8))
        assert rotation.cos[0, 0, 1].item() == pytest.approx(exact, abs=2**-8)


def test_prefixed_puts_a_name_in_front_of_every_slot() -> None:
    slots = RMSNorm(3, 1e-6, dtype=F32).weight_slots()
    assert list(prefixed("model.norm", slots)) == ["model.norm.weight"]
