"""The engine on CUDA: float32 gives the tokens of the CPU, bfloat16 still solves the tiny problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex_bench.answers import extract_strict, parse_number
from diffulex_bench.tiny import bundled_model
from tests.e2e.test_tensor_parallel import FAMILIES
from tests.golden.cases import DATA, case_id
from tests.golden.mapping import checkpoint_of, engine_case
from tests.golden.test_decode import OF_THE_ENGINE

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", OF_THE_ENGINE, ids=case_id)
def test_float32_on_the_gpu_decodes_the_reference_tokens(path: Path, tmp_path: Path) -> None:
    case = engine_case(path)
    with Diffulex(
        str(checkpoint_of(path, case.writes, tmp_path)),
        **case.settings,
        page_size=32,
        device="cuda",
        dtype="float32",
    ) as llm:
        sampling = SamplingParams(0.0, case.max_tokens, ignore_eos=not case.stop_ids)
        output = llm.generate([case.prompt], sampling).trajectories[0]
    end = case.limit if case.first_stop is None else case.first_stop
    assert output.token_ids == case.output_ids[len(case.prompt) : end]


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_decodes_on_the_gpu_what_the_cpu_decodes(case: str) -> None:
    tokens = []
    for device in ("cpu", "cuda"):
        with Diffulex(
            str(DATA / case),
            model_name=FAMILIES[case],
            decoding_strategy="multi_bd",
            device=device,
            dtype="float32",
            block_size=8,
            page_size=8,
            buffer_size=2,
        ) as llm:
            prompts = [[5, 9, 11, 30, 7], [8] * 17]
            outputs = llm.generate(prompts, SamplingParams(0.0, 24, ignore_eos=True)).trajectories
            tokens.append([output.token_ids for output in outputs])
    assert tokens[0] == tokens[1]


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
