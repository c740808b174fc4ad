"""The engine on CUDA: float32 gives the tokens of the CPU, bfloat16 still solves the tiny problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex_bench.answers import extract_strict, parse_number
from diffulex_bench.tiny import bundled_model
from tests.golden.cases import case_id, decode_cases
from tests.golden.test_decode import checkpoint_of, is_engine_case, load_case

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


def engine_cases() -> list[Path]:
    return [path for path in decode_cases() if path.parent.parent.name == "sdar"]


@pytest.mark.parametrize("path", engine_cases(), ids=case_id)
def test_float32_on_the_gpu_decodes_the_reference_tokens(path: Path, tmp_path: Path) -> None:
    case = load_case(path)
    if not is_engine_case(case):
        pytest.skip(f"{case_id(path)} is a loop of its own")
    params, prompt = case["params"], case["prompt_ids"][0]
    tokens = {}
    for device in ("cpu", "cuda"):
        with Diffulex(
            str(checkpoint_of(path, case, tmp_path / device)),
            model_name="sdar",
            device=device,
            dtype="float32",
            block_size=params["block_length"],
            page_size=32,
            buffer_size=2,
            accept_threshold=params.get("confidence_threshold", 1.0),
        ) as llm:
            sampling = SamplingParams(0.0, params["gen_length"], ignore_eos=True)
            outputs = llm.generate([prompt, prompt[:5], prompt * 2], sampling).trajectories
            tokens[device] = [output.token_ids for output in outputs]
    assert tokens["cuda"] == tokens["cpu"]


def test_bfloat16_on_the_gpu_solves_the_problems_of_the_tiny_model() -> None:
    from diffulex_bench.tiny.data import test_problems

    problems = test_problems(200)
    with Diffulex(
        str(bundled_model("tiny-sdar")), model_name="sdar", device="cuda", block_size=16, page_size=16
    ) as llm:
        assert llm.config.dtype == "bfloat16"
        outputs = llm.generate([problem.question + "\n" for problem in problems], SamplingParams(0.0, 320))
    found = [extract_strict(output.text) for output in outputs.trajectories]
    right = sum(
        one is not None and one.value == parse_number(problem.answer)
        for one, problem in zip(found, problems, strict=True)
    )
    # 98 % in float32; three standard errors of 200 problems and some for the rounding below that.
    assert right >= 0.93 * len(problems)
