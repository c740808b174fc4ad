"""Golden logits of checkpoints with a PEFT adapter: left out, beside the weights, merged into them."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.model.catalog import AutoModel
from tests.golden.cases import DATA, golden_root
from tests.golden.test_forward import CASES, TOLERANCE, Check, described
from tests.support.paged import PagedRun, Part, load

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from diffulex.model.decoder import DiffusionLM

ADAPTED = [Check(case, key) for case in CASES if (case / "adapter").is_dir() for key in described(case)]
#: A merged weight is rounded to float32 once more than the reference that computes the adapter beside it.
MERGED_TOLERANCE = 2e-4
EACH_CHECK = pytest.mark.parametrize("check", ADAPTED, ids=str)


@lru_cache(maxsize=4)
def model_with(case: Path, way: str) -> DiffusionLM:
    """The model of a case: `way` is "off", "beside" or "merged"."""
    family = case.parent.name
    if family not in AutoModel:
        pytest.skip(f"family not supported yet: {family}, golden case {case} was not run")
    return load(case, family, adapter=None if way == "off" else case / "adapter", merge=way == "merged")


def has_adapter(check: Check) -> bool:
    return bool(check.facts["weights"] != "base only")


def logits_of(model: DiffusionLM, check: Check) -> list[Tensor]:
    parts = [
        Part(request=row, ids=ids, ends=check.ends(), positions=check.positions(row))
        for row, ids in enumerate(check.input_ids)
    ]
    return PagedRun(model).logits(parts)


def test_the_bundled_adapters_are_found() -> None:
    if golden_root() != DATA:
        pytest.skip(f"other cases were asked for: {len(ADAPTED)} checks with an adapter in {golden_root()}")
    assert {check.case.parent.name for check in ADAPTED} == {"dream", "llada"}
    assert len(ADAPTED) == 8


@EACH_CHECK
@pytest.mark.parametrize("way", ["beside", "merged"])
def test_logits_are_those_of_the_reference_with_and_without_its_adapter(way: str, check: Check) -> None:
    expected = check.tensor("logits")
    assert expected is not None
    model = model_with(check.case, way if has_adapter(check) else "off")
    for row, logits in enumerate(logits_of(model, check)):
        check.compare(logits, expected[row], f"adapter {way}, row {row}")


@EACH_CHECK
def test_the_adapter_matters(check: Check) -> None:
    """Half the adapter would pass no test above; this says that no adapter would not either."""
    off, on = (logits_of(model_with(check.case, way), check) for way in ("off", "beside"))
    assert max(float((one - other).abs().max()) for one, other in zip(off, on, strict=True)) > 1


@EACH_CHECK
@pytest.mark.parametrize("way", ["beside", "merged"])
def test_windows_on_a_cached_prefix_have_the_adapter_as_well(way: str, check: Check) -> None:
    expected, ends, borders = check.tensor("logits"), check.ends(), check.borders()
    assert expected is not None
    model = model_with(check.case, way if has_adapter(check) else "off")
    num_rows, length = check.input_ids.shape
    run = PagedRun(model, 4, num_rows * (length // 4 + 1))
    start = 0
    for stop in borders:
        parts = [
            Part(row, ids[start:stop], ends[start:stop], start, True, check.positions(row)[start:stop])
            for row, ids in enumerate(check.input_ids)
        ]
        for row, logits in enumerate(run.logits(parts)):
            what, allowed = f"adapter {way}, row {row}, [{start}, {stop})", TOLERANCE
            if way == "merged":
                allowed = MERGED_TOLERANCE
            check.compare(logits, expected[row, start:stop], what, allowed)
        start = stop


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_the_engine_decodes_the_same_tokens_beside_and_merged(family: str) -> None:
    case = DATA / family / "lora"
    prompt = json.loads((case / "decode_d2f_b4_adapter.json").read_text())["prompt_ids"][0]
    answers = []
    for settings in ({}, {"use_lora": True}, {"use_lora": True, "pre_merge_lora": True}):
        adapter = {"lora_path": str(case / "adapter")} if settings else {}
        with Diffulex(
            str(case), model_name=family, decoding_strategy="multi_bd", block_size=4, tensor_parallel_size=1,
            **settings, **adapter,
        ) as llm:  # fmt: skip
            output = llm.generate([prompt], SamplingParams(0.0, 24, ignore_eos=True)).trajectories[0]
        answers.append((output.token_ids, output.nfe.denoise))
    off, beside, merged = answers
    assert beside == merged
    assert off[0] != beside[0]
    assert len(beside[0]) == 24
