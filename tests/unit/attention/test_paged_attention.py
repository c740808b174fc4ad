from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffulex.attention.ops.paged_attention import ATTENTION_FORMS, paged_attention
from diffulex.attention.ops.paged_attention.padded import _Span, group_spans
from diffulex.attention.ops.paged_attention.reference import reference_attention
from tests.unit.attention.batches import Inputs, make_inputs

SIZES = st.lists(
    st.tuples(st.integers(1, 40), st.one_of(st.just(0), st.integers(1, 60))), min_size=1, max_size=7
)


def attend(inputs: Inputs) -> torch.Tensor:
    return paged_attention(*inputs, 0.3)


@given(
    sizes=SIZES,
    page_size=st.sampled_from([4, 8, 32]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (6, 3)]),
    seed=st.integers(0, 999),
)
def test_ragged_batches_equal_one_request_at_a_time(
    sizes: list[tuple[int, int]], page_size: int, heads: tuple[int, int], seed: int
) -> None:
    inputs = make_inputs(sizes, page_size=page_size, num_heads=heads[0], num_kv_heads=heads[1], seed=seed)
    torch.testing.assert_close(attend(inputs), reference_attention(*inputs, 0.3), atol=2e-6, rtol=1e-5)


def test_a_row_by_hand() -> None:
    """Two cached keys and two fresh ones; the first row sees three of them, the second all."""
    inputs = make_inputs([(2, 2)], num_heads=1, num_kv_heads=1, head_dim=2)
    inputs.metadata.visible_ends[:] = torch.tensor([3, 99])
    page = int(inputs.metadata.page_tables[0, 0])
    keys = torch.cat([inputs.k_cache[page, :2, 0], inputs.key[:, 0]]).tolist()
    values = torch.cat([inputs.v_cache[page, :2, 0], inputs.value[:, 0]]).tolist()
    for row, seen in ((0, 3), (1, 4)):
        query = inputs.query[row, 0].tolist()
        weights = [math.exp(0.3 * (query[0] * k[0] + query[1] * k[1])) for k in keys[:seen]]
        expected = [
            sum(w * v[i] for w, v in zip(weights, values, strict=False)) / sum(weights) for i in (0, 1)
        ]
        for form in (paged_attention, reference_attention):
            assert form(*inputs, 0.3)[row, 0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sick", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("where", ["query", "key", "value", "k_cache", "v_cache"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_a_number_stays_within_its_request(sick: int, where: str, poison: float) -> None:
    sizes = [(5, 9), (16, 30), (3, 0), (16, 29), (7, 12)]
    inputs = make_inputs(sizes, seed=4)
    healthy = attend(inputs)
    borders = inputs.metadata.cu_q_lens.tolist()
    start, stop = borders[sick], borders[sick + 1]
    if where.endswith("cache"):
        pages = [page for page in inputs.metadata.page_tables[sick].tolist() if page >= 0]
        getattr(inputs, where)[pages] = poison
    else:
        getattr(inputs, where)[start:stop] = poison
    inputs.metadata.scratch.clear()
    after = attend(inputs)
    others = torch.ones(borders[-1], dtype=torch.bool)
    others[start:stop] = False
    torch.testing.assert_close(after[others], healthy[others], atol=0, rtol=0)
    if sizes[sick][1] > 0 or not where.endswith("cache"):
        assert not bool(torch.isfinite(after[start:stop]).all())


def test_the_plan_of_a_forward_serves_all_its_layers() -> None:
    sizes = [(4, 6), (9, 0), (4, 7)]
    first, second = make_inputs(sizes, seed=1), make_inputs(sizes, seed=2)
    second.metadata.page_tables = first.metadata.page_tables
    shared = second._replace(metadata=first.metadata, k_cache=first.k_cache * 2, v_cache=first.v_cache + 1)
    one = attend(first).clone()
    two = attend(shared)
    torch.testing.assert_close(one, reference_attention(*first, 0.3))
    torch.testing.assert_close(two, reference_attention(*shared, 0.3))


def test_requests_without_rows_change_nothing() -> None:
    inputs = make_inputs([(3, 5), (4, 0)])
    metadata = dataclasses.replace(
        inputs.metadata,
        cu_q_lens=torch.tensor([0, 3, 3, 7, 7], dtype=torch.int32),
        context_lens=torch.tensor([5, 2, 0, 0], dtype=torch.int32),
        page_tables=inputs.metadata.page_tables[[0, 0, 1, 1]],
        scratch={},
    )
    torch.testing.assert_close(attend(inputs._replace(metadata=metadata)), attend(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_result_only(dtype: torch.dtype) -> None:
    inputs = make_inputs([(6, 11), (9, 0)], dtype=dtype)
    out = attend(inputs)
    assert out.dtype == dtype
    wide = Inputs(*(x.float() for x in inputs[:5]), dataclasses.replace(inputs.metadata, scratch={}))
    # 2^-8: half a unit in the last place of bfloat16 around 1, twice, for weights and result.
    torch.testing.assert_close(out.float(), attend(wide), atol=1.6e-2, rtol=1.6e-2)


def test_batches_keep_a_long_prefill_apart_from_short_windows() -> None:
    for context in (0, 16):
        spans = [_Span(0, 400, context), *(_Span(i, 16, 200 + i) for i in range(1, 32))]
        groups = group_spans(spans)
        assert [{span.num_rows for span in group} for group in groups if len(group) == 1] == [{400}]
        assert len(groups) == 2
        assert sorted(span.request for group in groups for span in group) == list(range(32))


@given(sizes=SIZES)
def test_batches_never_mix_requests_with_and_without_a_context(sizes: list[tuple[int, int]]) -> None:
    groups = group_spans([_Span(i, rows, context) for i, (rows, context) in enumerate(sizes)])
    assert sorted(span.request for group in groups for span in group) == list(range(len(sizes)))
    for group in groups:
        assert len({span.context_len > 0 for span in group}) == 1


def test_equal_windows_share_one_batch() -> None:
    assert len(group_spans([_Span(i, 32, 300) for i in range(8)])) == 1


def test_forms_are_looked_up_by_the_name_in_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs([(2, 0)])
    monkeypatch.setitem(ATTENTION_FORMS, "twice", lambda *args: 2 * reference_attention(*args))  # type: ignore[arg-type]
    inputs.metadata.attn_impl = "twice"
    torch.testing.assert_close(attend(inputs), 2 * reference_attention(*inputs, 0.3))
