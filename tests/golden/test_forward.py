"""Logits of every golden check: the whole sequence under its mask, and windows over cached pages.

``DIFFULEX_GOLDEN_ROOT`` runs the cases of another folder instead; a check of a family that is not there yet
is skipped with its name in the report. Checks whose weights carry an adapter are the business of the tests of
adapters, canvases that of their own file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
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

#: float32 on a CPU; other folders state their own where they need more.
TOLERANCE = 1e-4
BUNDLED = {
    "dream/gqa", "dream/lora", "dream_reasoner/gqa", "fast_dllm_v2/bd32_tied", "fast_dllm_v2/bd8",
    "llada/gqa", "llada/lora", "llada/mha", "sdar/dense_b4_headdim", "sdar/dense_b8_tied_mqa",
    "sdar_moe/moe_norm_true", "sdar_moe/moe_norm_false_mixed_layers", "llada2_mini/grouped",
    "llada2_mini/ungrouped", "llada2_mini_dmax/grouped",
}  # fmt: skip


@lru_cache
def described(case: Path) -> dict[str, dict[str, Any]]:
    """The numbered checks of a case as forward.json describes them."""
    content = json.loads((case / "forward.json").read_text())
    if "checks" in content:
        return {str(check["k"]): check for check in content["checks"]}
    return {key: check for key, check in content.items() if key.isdigit()}


@lru_cache
def tensors_of(case: Path) -> dict[str, Tensor]:
    return load_file(case / "forward.safetensors")


@lru_cache(maxsize=2)
def model_of(case: Path) -> DiffusionLM:
    return load(case, case.parent.name)


@dataclass(frozen=True)
class Check:
    """One numbered check of a case."""

    case: Path
    key: str

    def __str__(self) -> str:
        return f"{self.case.parent.name}/{self.case.name}/{self.key}"

    @property
    def facts(self) -> dict[str, Any]:
        return described(self.case)[self.key]

    def tensor(self, name: str) -> Tensor | None:
        return tensors_of(self.case).get(f"{name}_{self.key}")

    @property
    def input_ids(self) -> Tensor:
        return tensors_of(self.case)[f"input_ids_{self.key}"]

    def positions(self, row: int) -> Tensor:
        given = self.tensor("position_ids")
        return torch.arange(self.input_ids.shape[1]) if given is None else given[row % len(given)]

    def mask(self) -> Tensor:
        """The explicit matrix that the check names."""
        length, kind = self.input_ids.shape[1], self.facts["mask"]
        if kind == "full":
            return masks.full(length)
        if kind == "causal":
            return masks.causal(length)
        if kind == "block_causal":
            return masks.block_causal(length, self.facts["block_size"])
        if kind == "d2f":
            return masks.d2f(length, self.facts["prompt_length"], self.facts["block_size"])
        raise AssertionError(f"{self} has a mask of the unknown kind {kind!r}")

    def ends(self) -> Tensor:
        """The explicit mask as visible ends, which must say exactly the same."""
        mask = self.mask()
        ends = mask.sum(dim=-1)
        assert torch.equal(masks.mask_of(ends, len(ends)), mask)
        return ends

    def borders(self) -> list[int]:
        """Positions up to which the sequence can be computed without what follows, its end included."""
        ends = self.ends()
        return [i for i in range(1, len(ends) + 1) if int(ends[:i].max()) <= i]

    def model(self) -> DiffusionLM:
        family = self.case.parent.name
        if family not in AutoModel:
            pytest.skip(f"family not supported yet: {family}, golden check {self} was not run")
        return model_of(self.case)

    def compare(self, actual: Tensor, expected: Tensor, what: str, allowed: float = TOLERANCE) -> None:
        if golden_root() != DATA:
            allowed = max(allowed, self.facts.get("atol", self.facts.get("suggested_atol", 0.0)))
        worst = float((actual - expected).abs().max())
        assert worst <= allowed, f"check {self}, {what}: logits differ by {worst}"


CASES = sorted(
    path.parent
    for path in golden_root().glob("*/*/forward.json")
    if path.parent.parent.name != "diffusion_gemma"
)
CHECKS = [
    Check(case, key)
    for case in CASES
    for key, facts in described(case).items()
    if facts.get("weights", "base only") == "base only"
]
EACH_CHECK = pytest.mark.parametrize("check", CHECKS, ids=str)


def test_the_bundled_cases_of_the_dense_families_are_found() -> None:
    if golden_root() != DATA:
        pytest.skip(f"other cases were asked for: {len(CASES)} with a forward.json under {golden_root()}")
    assert {f"{case.parent.name}/{case.name}" for case in CASES} >= BUNDLED


@EACH_CHECK
@pytest.mark.parametrize("form", ["naive", "reference"])
def test_whole_sequence_under_its_mask_gives_the_golden_logits(
    form: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_FORMS, "reference", reference_attention)  # type: ignore[arg-type]
    monkeypatch.setitem(STORE_FORMS, "reference", store_rows)  # type: ignore[arg-type]
    model, ids, ends = check.model(), check.input_ids, check.ends()
    parts = [
        Part(request=row, ids=ids[row], ends=ends, positions=check.positions(row)) for row in range(len(ids))
    ]
    expected = check.tensor("logits")
    assert expected is not None
    for row, logits in enumerate(PagedRun(model).logits(parts, form)):
        check.compare(logits, expected[row], f"row {row}")


@EACH_CHECK
@pytest.mark.parametrize("page_size", [4, 8, 16, 32])
@pytest.mark.parametrize("window_blocks", [1, 2])
def test_windows_on_a_cached_prefix_give_the_golden_logits(
    page_size: int, window_blocks: int, check: Check
) -> None:
    """Prefill up to a border, then windows; each window is first read without storing, as denoising does."""
    model, ends, borders = check.model(), check.ends(), check.borders()
    num_rows, length = check.input_ids.shape
    expected = check.tensor("logits")
    assert expected is not None
    gap = max(1, 4 // (borders[1] - borders[0])) if len(borders) > 1 else 1
    for first in range(0, len(borders), gap):
        run = PagedRun(model, page_size, num_pages=2 * num_rows * (length // page_size + 1), seed=first)
        start = 0
        stops = [*borders[first:-1:window_blocks], length]
        for stop in stops:
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


CACHED = [check for check in CHECKS if "cached_prefix_len" in check.facts]


@pytest.mark.parametrize("check", CACHED, ids=str)
def test_rows_behind_the_stated_cached_prefix_give_the_cached_logits(check: Check) -> None:
    model, ends, cut = check.model(), check.ends(), check.facts["cached_prefix_len"]
    num_rows, length = check.input_ids.shape
    expected = check.tensor("cached_logits")
    assert expected is not None
    run = PagedRun(model, page_size=8, num_pages=num_rows * (length // 8 + 1))
    rows = range(num_rows)
    run.logits([Part(row, check.input_ids[row, :cut], ends[:cut], is_stored=True) for row in rows])
    behind = run.logits([Part(row, check.input_ids[row, cut:], ends[cut:], start=cut) for row in rows])
    for row in range(len(expected)):
        check.compare(behind[row], expected[row], f"row {row} behind the cached prefix")


STALE = [check for check in CHECKS if check.tensor("subblock_logits") is not None]


@pytest.mark.parametrize("check", STALE, ids=str)
def test_a_part_of_a_block_reads_the_stale_keys_of_the_rest_of_its_block(check: Check) -> None:
    """The page table names the pages behind the part before it: attention does not look at their order."""
    model, ids, size = check.model(), check.input_ids[0], check.facts["block_size"]
    changed, expected = check.tensor("changed_input_ids"), check.tensor("subblock_logits")
    assert changed is not None
    assert expected is not None
    start, stop = len(ids) - size, len(ids) - size + expected.shape[1]
    page = 4
    run = PagedRun(model, page, num_pages=len(ids) // page)
    ends = check.ends()
    run.logits([Part(0, ids[:start], ends[:start], is_stored=True)])
    run.logits([Part(0, ids[start:], ends[start:], start=start, is_stored=True)])
    run.tables[0] = run.tables[0][: start // page] + run.tables[0][stop // page :]
    num_read = page * len(run.tables[0])
    everything = torch.full((stop - start,), num_read + stop - start)
    part = Part(0, changed[0, start:stop], everything, num_read, positions=torch.arange(start, stop))
    check.compare(run.logits([part])[0], expected[0], f"[{start}, {stop}) over a stale block")
