"""Golden logits and traces with the KV cache in its other layout: pages head by head, keys in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.attention.cache_layout import DistinctLayout
from diffulex.config import ConfigError
from tests.golden.cases import DATA
from tests.golden.test_forward import EACH_CHECK, Check
from tests.support.paged import PagedRun, Part

DENSE_B4 = DATA / "sdar" / "dense_b4_headdim"


@EACH_CHECK
@pytest.mark.parametrize("split", [2, 4])
def test_windows_on_split_pages_give_the_golden_logits(split: int, check: Check) -> None:
    model, ends, borders = check.model(), check.ends(), check.borders()
    if any(layer.kv_shape.head_dim % split for layer in model.attention_layers()):
        pytest.skip(f"the head width of {check} is no multiple of {split}")
    num_rows, length = check.input_ids.shape
    expected = check.tensor("logits")
    assert expected is not None
    run = PagedRun(model, 8, num_rows * (length // 8 + 1), layout=DistinctLayout(split))
    start = 0
    for stop in borders:
        for is_stored in (False, True):
            parts = [
                Part(
                    row,
                    check.input_ids[row, start:stop],
                    ends[start:stop],
                    start,
                    is_stored,
                    check.positions(row)[start:stop],
                )
                for row in range(num_rows)
            ]
            for row, logits in enumerate(run.logits(parts)):
                check.compare(logits, expected[row, start:stop], f"row {row}, [{start}, {stop}) on pages")
        start = stop


def decode(case: dict[str, Any], **settings: Any) -> list[tuple[list[int], int, list[Any]]]:
    params, prompt = case["params"], case["prompt_ids"][0]
    with Diffulex(
        str(DENSE_B4), model_name="sdar", decoding_strategy="multi_bd", block_size=params["block_length"],
        page_size=max(8, params["block_length"]), save_trace=True, tensor_parallel_size=1, **settings,
    ) as llm:  # fmt: skip
        prompts = [prompt, prompt[:3], prompt + prompt[::-1]]
        outputs = llm.generate(prompts, SamplingParams(0.0, params["gen_length"])).trajectories
    return [(o.token_ids, o.nfe.total, [record.filled for record in o.trajectory]) for o in outputs]


@pytest.mark.parametrize("split", [1, 4, 8])
@pytest.mark.parametrize("name", ["static_b4_unaligned", "dynamic_b8_aligned_t07"])
def test_the_engine_decodes_the_same_tokens_in_both_layouts(name: str, split: int) -> None:
    case = json.loads((DENSE_B4 / f"decode_{name}.json").read_text())
    plain = decode(case)
    assert plain == decode(case, kv_cache_layout="distinct", k_cache_hdim_split_factor_x=split)
    assert sum(len(tokens) for tokens, *_ in plain) > 20


def test_the_pages_of_a_split_cache_have_the_documented_axes() -> None:
    with Diffulex(
        str(DENSE_B4), model_name="sdar", num_pages=8, page_size=32, max_model_len=64,
        kv_cache_layout="distinct", k_cache_hdim_split_factor_x=4,
    ) as llm:  # fmt: skip
        (layer, *_) = llm.runner.model.attention_layers()
        heads, width = layer.kv_shape
        assert layer.k_cache is not None
        assert layer.v_cache is not None
        assert layer.k_cache.shape == (8, heads, width // 4, 32, 4)
        assert layer.v_cache.shape == (8, heads, width, 32)


def test_a_head_that_does_not_split_is_refused_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("a weight was loaded"))
    with pytest.raises(ConfigError, match=r"k_cache_hdim_split_factor_x \(7\) must divide the head width"):
        Diffulex(str(DENSE_B4), model_name="sdar", kv_cache_layout="distinct", k_cache_hdim_split_factor_x=7)


def test_a_split_without_the_layout_that_reads_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="k_cache_hdim_split_factor_x=4 has no effect without"):
        Diffulex(str(DENSE_B4), model_name="sdar", k_cache_hdim_split_factor_x=4)
