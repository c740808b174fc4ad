"""Logits of every golden case: the whole sequence under its mask, and windows over cached pages.

``DIFFULEX_GOLDEN_ROOT`` runs the cases of another folder instead; a case of a family that is not there yet
is skipped with its name in the report.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from diffulex.attention import masks
from diffulex.attention.ops.paged_attention import ATTENTION_FORMS
from diffulex.attention.ops.paged_attention.reference import reference_attention
from diffulex.attention.ops.store_kv import STORE_FORMS
from diffulex.attention.ops.store_kv.reference import store_rows
from diffulex.model.catalog import AutoModel
from tests.golden.cases import DATA, golden_root
from tests.support.paged import PagedRun, Part, load

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from diffulex.model.decoder import DiffusionLM

CASES = sorted(path.parent for path in golden_root().glob("*/*/forward.json"))
#: float32 on a CPU; other folders state their own where they need more.
TOLERANCE = 1e-4


def case_id(case: Path) -> str:
    return f"{case.parent.name}/{case.name}"


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def case(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    if path.parent.name not in AutoModel:
        pytest.skip(f"family not supported yet: {path.parent.name}, golden case {case_id(path)} was not run")
    return path


@pytest.fixture(scope="module")
def model(case: Path) -> DiffusionLM:
    return load(case, case.parent.name)


@pytest.fixture(scope="module")
def checks(case: Path) -> list[dict[str, Any]]:
    """The numbered checks of a case with their tensors."""
    described = json.loads((case / "forward.json").read_text())
    tensors = load_file(case / "forward.safetensors")
    numbered = {key: check for key, check in described.items() if key.isdigit()}
    return [
        {
            **check,
            "name": key,
            "input_ids": tensors[f"input_ids_{key}"],
            "logits": tensors[f"logits_{key}"],
            "position_ids": tensors.get(f"position_ids_{key}"),
            "cached_logits": tensors.get(f"cached_logits_{key}"),
            "atol": TOLERANCE if golden_root() == DATA else max(TOLERANCE, check.get("atol", 0.0)),
        }
        for key, check in numbered.items()
    ]


def explicit_mask(check: dict[str, Any], length: int) -> Tensor:
    kind = check["mask"]
    if kind == "full":
        return masks.full(length)
    if kind == "causal":
        return masks.causal(length)
    if kind == "block_causal":
        return masks.block_causal(length, check["block_size"])
    if kind == "d2f":
        return masks.d2f(length, check["prompt_length"], check["block_size"])
    raise AssertionError(f"check {check['name']} has a mask of the unknown kind {kind!r}")


def visible_ends(check: dict[str, Any], length: int) -> Tensor:
    """The explicit mask as ends, which must say exactly the same."""
    mask = explicit_mask(check, length)
    ends = mask.sum(dim=-1)
    assert torch.equal(masks.mask_of(ends, length), mask)
    return ends


def assert_close(actual: Tensor, expected: Tensor, check: dict[str, Any], what: str) -> None:
    worst = float((actual - expected).abs().max())
    assert worst <= check["atol"], f"check {check['name']}, {what}: logits differ by {worst}"


def test_the_bundled_cases_are_found() -> None:
    if golden_root() != DATA:
        pytest.skip(f"other cases were asked for: {len(CASES)} with a forward.json under {golden_root()}")
    assert [case_id(case) for case in CASES] == ["sdar/dense_b4_headdim", "sdar/dense_b8_tied_mqa"]


@pytest.mark.parametrize("form", ["naive", "reference"])
def test_whole_sequence_under_its_mask_gives_the_golden_logits(
    form: str, model: DiffusionLM, checks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_FORMS, "reference", reference_attention)  # type: ignore[arg-type]
    monkeypatch.setitem(STORE_FORMS, "reference", store_rows)  # type: ignore[arg-type]
    assert checks
    for check in checks:
        ids = check["input_ids"]
        given = check["position_ids"]
        parts = [
            Part(
                request=row,
                ids=ids[row],
                ends=visible_ends(check, ids.shape[1]),
                positions=None if given is None else given[row % len(given)],
            )
            for row in range(len(ids))
        ]
        for row, logits in enumerate(PagedRun(model).logits(parts, form)):
            assert_close(logits, check["logits"][row], check, f"row {row}")


@pytest.mark.parametrize("page_size", [4, 8, 16, 32])
@pytest.mark.parametrize("window_blocks", [1, 2])
def test_windows_on_a_cached_prefix_give_the_golden_logits(
    page_size: int, window_blocks: int, model: DiffusionLM, checks: list[dict[str, Any]]
) -> None:
    """Prefill some blocks, then windows; each window is first read without storing, as denoising does."""
    paged = [c for c in checks if c["mask"] in ("causal", "block_causal") and c["position_ids"] is None]
    assert paged
    for check in paged:
        num_rows, length = check["input_ids"].shape
        block = check.get("block_size", 1)
        ends = visible_ends(check, length)
        for first_cut in range(block, length, max(block, 4)):
            run = PagedRun(
                model, page_size, num_pages=2 * num_rows * (length // page_size + 1), seed=first_cut
            )
            start = 0
            for stop in [*range(first_cut, length, window_blocks * block), length]:
                for is_stored in (False, True):
                    parts = [
                        Part(row, check["input_ids"][row, start:stop], ends[start:stop], start, is_stored)
                        for row in range(num_rows)
                    ]
                    for row, logits in enumerate(run.logits(parts)):
                        expected = check["logits"][row, start:stop]
                        assert_close(logits, expected, check, f"row {row}, [{start}, {stop}) on pages")
                start = stop


def test_rows_behind_the_stated_cached_prefix_give_the_cached_logits(
    model: DiffusionLM, checks: list[dict[str, Any]]
) -> None:
    for check in checks:
        if check["cached_logits"] is None:
            continue
        ids, cut = check["input_ids"][0], check["cached_prefix_len"]
        ends = visible_ends(check, len(ids))
        run = PagedRun(model, page_size=8, num_pages=len(ids) // 8 + 1)
        run.logits([Part(0, ids[:cut], ends[:cut], is_stored=True)])
        (logits,) = run.logits([Part(0, ids[cut:], ends[cut:], start=cut)])
        assert_close(logits, check["cached_logits"][0], check, "behind the cached prefix")
