"""DiffusionGemma's golden logits: text and canvas in one forward, and canvases on text in pages.

``DIFFULEX_GOLDEN_ROOT`` runs the cases of another folder instead.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from diffulex.attention.cache_layout import CacheLayout, DistinctLayout, UnifiedLayout
from diffulex.attention.ops.paged_attention import ATTENTION_FORMS
from diffulex.attention.ops.paged_attention.reference import reference_attention
from diffulex.attention.ops.store_kv import STORE_FORMS
from diffulex.attention.ops.store_kv.reference import store_rows
from tests.golden.cases import DATA, golden_root
from tests.support.canvas import CanvasRun, Rows, load_gemma

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from diffulex.model.diffusion_gemma import DiffusionGemmaLM

CASES = sorted(path.parent for path in golden_root().glob("diffusion_gemma/*/forward.json"))
#: float32 on a CPU; the files allow 1e-3, which holds for cases of other folders.
FILE_TOLERANCE = 1e-3
TOLERANCE = 1e-4 if golden_root() == DATA else FILE_TOLERANCE
#: What the second step's feedback was divided by, as forward.json says.
FEEDBACK_TEMPERATURE = 0.55


class Check(NamedTuple):
    """One numbered check; ids are ``[B, L]``, what is expected has a row more for each of them."""

    name: str
    prompt: Tensor
    canvas: Tensor
    logits: Tensor
    logits_sc: Tensor
    encoder_hidden: Tensor
    committed: Tensor | None
    next_canvas: Tensor | None
    logits_next: Tensor | None

    @property
    def prompt_len(self) -> int:
        return self.prompt.shape[1]

    @property
    def num_rows(self) -> int:
        return self.prompt.shape[0]

    def assert_close(self, actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
        worst = float((actual - expected).abs().max())
        assert worst <= tolerance, f"check {self.name}, {what}: differs by {worst}"


def read_checks(case: Path) -> list[Check]:
    described, tensors = (
        json.loads((case / "forward.json").read_text()),
        load_file(case / "forward.safetensors"),
    )
    return [
        Check(
            key,
            tensors[f"prompt_ids_{key}"],
            tensors[f"canvas_ids_{key}"],
            tensors[f"logits_{key}"],
            tensors[f"logits_sc_{key}"],
            tensors[f"encoder_hidden_{key}"],
            tensors.get(f"committed_ids_{key}"),
            tensors.get(f"next_canvas_ids_{key}"),
            tensors.get(f"logits_next_{key}"),
        )
        for key in described["checks"]
    ]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def model(case: Path) -> DiffusionGemmaLM:
    return load_gemma(case)


@pytest.fixture(scope="module")
def checks(case: Path) -> list[Check]:
    found = read_checks(case)
    assert found
    return found


@pytest.fixture(autouse=True)
def reference_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_FORMS, "reference", reference_attention)  # type: ignore[arg-type]
    monkeypatch.setitem(STORE_FORMS, "reference", store_rows)  # type: ignore[arg-type]


def test_the_bundled_cases_are_found() -> None:
    if golden_root() != DATA:
        pytest.skip(f"other cases were asked for: {len(CASES)} of diffusion_gemma under {golden_root()}")
    assert [case.name for case in CASES] == ["c16", "c256"]
    assert [len(read_checks(case)) for case in CASES] == [2, 1]
    assert [check.prompt_len for check in read_checks(CASES[0])] == [5, 21]
    assert all(check.logits_next is not None for check in read_checks(CASES[0]))


@pytest.mark.parametrize("form", ["naive", "reference"])
def test_text_and_canvas_in_one_forward_without_pages_give_the_golden_tensors(
    form: str, model: DiffusionGemmaLM, checks: list[Check]
) -> None:
    """The text rows of a request are encoded, its last rows are a canvas: two passes under one mask."""
    for check in checks:
        length = check.prompt_len
        joined = torch.cat([check.prompt, check.canvas], dim=1)
        first = [Rows(i, ids, canvas_start=length) for i, ids in enumerate(joined)]
        for i, hidden in enumerate(CanvasRun(model).forward(first, form)):
            check.assert_close(hidden[:length], check.encoder_hidden[i], f"row {i}, encoder")
            check.assert_close(model.compute_logits(hidden[length:]), check.logits[i], f"row {i}, first step")
        second = [
            Rows(
                i,
                ids,
                canvas_start=length,
                expected=model.expected_embeds(check.logits[i] / FEEDBACK_TEMPERATURE),
            )
            for i, ids in enumerate(joined)
        ]
        for i, hidden in enumerate(CanvasRun(model).forward(second, form)):
            logits = model.compute_logits(hidden[length:])
            check.assert_close(logits, check.logits_sc[i], f"row {i}, second step")
        if check.committed is None or check.next_canvas is None or check.logits_next is None:
            continue
        joined = torch.cat([check.prompt, check.committed, check.next_canvas], dim=1)
        length += check.committed.shape[1]
        third = [Rows(i, ids, canvas_start=length) for i, ids in enumerate(joined)]
        for i, hidden in enumerate(CanvasRun(model).forward(third, form)):
            logits = model.compute_logits(hidden[length:])
            check.assert_close(logits, check.logits_next[i], f"row {i}, next canvas")


@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 256])
@pytest.mark.parametrize("chunk", [3, 8, 1000])
@pytest.mark.parametrize("layout", [UnifiedLayout(), DistinctLayout(2)], ids=lambda layout: layout.name)
def test_canvases_on_text_in_pages_give_the_golden_tensors(
    layout: CacheLayout, page_size: int, chunk: int, model: DiffusionGemmaLM, checks: list[Check]
) -> None:
    """Prompts are encoded chunk by chunk; two steps follow, then the next canvas on the committed one."""
    for check in checks:
        rows, length = range(check.num_rows), check.prompt_len
        total = length + check.canvas.shape[1]
        run = CanvasRun(model, page_size, check.num_rows * (total // page_size + 1), chunk, layout)
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            hidden = run.encode([(i, check.prompt[i, start:stop], start) for i in rows])
            for i in rows:
                check.assert_close(hidden[i], check.encoder_hidden[i, start:stop], f"row {i} from {start}")
        canvases = [(i, check.canvas[i], length) for i in rows]
        first = run.denoise(canvases)
        second = run.denoise(canvases, [logits / FEEDBACK_TEMPERATURE for logits in check.logits])
        own = run.denoise(canvases, [logits / FEEDBACK_TEMPERATURE for logits in first])
        for i in rows:
            check.assert_close(first[i], check.logits[i], f"row {i}, first step")
            check.assert_close(second[i], check.logits_sc[i], f"row {i}, second step")
            # Feeding back what was computed here adds up the rounding of both steps.
            what = f"row {i}, second step from the first"
            check.assert_close(own[i], check.logits_sc[i], what, FILE_TOLERANCE)
        if check.committed is None or check.next_canvas is None or check.logits_next is None:
            continue
        run.encode([(i, check.committed[i], length) for i in rows])
        after = run.denoise([(i, check.next_canvas[i], total) for i in rows])
        for i in rows:
            check.assert_close(after[i], check.logits_next[i], f"row {i}, next canvas")


def test_one_request_may_encode_while_others_denoise(model: DiffusionGemmaLM, checks: list[Check]) -> None:
    """All checks of a case at once: each step of one runs beside another step of the others."""
    run = CanvasRun(model, page_size=8, num_pages=200)
    prompts, canvases, logits = [], [], []
    for check in checks:
        prompts += list(check.prompt)
        canvases += list(check.canvas)
        logits += list(check.logits)
    for turn in range(len(prompts) + 2):
        parts, wanted = [], []
        for i, prompt in enumerate(prompts):
            if turn == i:
                parts.append(Rows(i, prompt, is_stored=True))
                wanted.append(None)
            elif turn > i:
                feedback = None if turn == i + 1 else model.expected_embeds(logits[i] / FEEDBACK_TEMPERATURE)
                start = len(prompt)
                parts.append(Rows(i, canvases[i], start, canvas_start=start, expected=feedback))
                wanted.append(i if turn == i + 1 else None)
        for hidden, i in zip(run.forward(parts), wanted, strict=True):
            if i is not None:
                checks[0].assert_close(model.compute_logits(hidden), logits[i], f"request {i}, turn {turn}")
