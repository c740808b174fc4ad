"""DiffusionGemma's decode traces on our network and sampler: every step of every canvas.

Each row of a batch is decoded on its own. A trace is followed twice: with the recorded draws, and with the
draws of a generator seeded as the reference's, which only a batch of one can share with it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from diffulex.sampler.diffusion_gemma import CanvasRules, SeededNoise
from tests.golden.cases import DATA, golden_root
from tests.support.canvas import load_gemma
from tests.support.canvas_loop import Answer, decode

if TYPE_CHECKING:
    from pathlib import Path

CASES = sorted(golden_root().glob("diffusion_gemma/*/decode_*.json"))
#: Two float32 implementations agree to 2e-4 in a step. Each step feeds its prediction to the next, so
#: rounding adds up: after six steps of 256 positions the recorded entropies are 4.7e-4 from those of float64.
ENTROPY_TOLERANCE = 1e-3


def case_id(path: Path) -> str:
    return f"{path.parent.name}-{path.stem.removeprefix('decode_')}"


def rules_of(case: dict[str, Any]) -> CanvasRules:
    params = case["params"]
    return CanvasRules(
        max_denoising_steps=params["max_denoising_steps"],
        t_min=params["t_min"],
        t_max=params["t_max"],
        entropy_bound=params["entropy_bound"],
        stability_threshold=params["stability_threshold"],
        confidence_threshold=params["confidence_threshold"],
    )


def steps_of(case: dict[str, Any], row: int) -> list[list[dict[str, Any]]]:
    """The steps of each canvas up to the one after which this row stands still."""
    canvases = []
    for canvas in case["trace"]:
        steps = [
            {key: value[row] if isinstance(value, list) else value for key, value in step.items()}
            for step in canvas["steps"]
        ]
        last = next((i for i, step in enumerate(steps) if step["stop"]), len(steps) - 1)
        canvases.append(steps[: last + 1])
    return canvases


class RecordedNoise:
    """The canvases, draws and refills of one row of a trace, in the order in which they were made."""

    def __init__(self, case: dict[str, Any], row: int) -> None:
        self.canvases = iter([canvas["initial_canvas"][row] for canvas in case["trace"]])
        steps = [step for canvas in steps_of(case, row) for step in canvas]
        self.draws = iter([step["sampled"] for step in steps])
        self.refills = iter([step["renoise_tokens"] for step in steps])

    def initial_canvas(self, num: int) -> torch.Tensor:
        return torch.tensor(next(self.canvases))

    def draw(self, logits_CV: torch.Tensor) -> torch.Tensor:
        return torch.tensor(next(self.draws))

    def refill(self, num: int) -> torch.Tensor:
        return torch.tensor(next(self.refills))


class SeededLikeTheReference(SeededNoise):
    """A generator in the state of the reference's; a first canvas that was given replaces the drawn one."""

    def __init__(self, case: dict[str, Any], vocab_size: int) -> None:
        randomness = case["randomness"]
        generator = torch.Generator().manual_seed(randomness["torch_manual_seed"])
        super().__init__(vocab_size, generator, is_greedy=randomness["draw"] == "argmax")
        self.given = torch.tensor(case["trace"][0]["initial_canvas"][0])
        self.is_given = "starting canvas is given" in randomness["notes"]

    def initial_canvas(self, num: int) -> torch.Tensor:
        drawn = super().initial_canvas(num)
        if self.is_given:
            self.is_given = False
            return self.given
        return drawn


def assert_same_steps(answer: Answer, case: dict[str, Any], row: int) -> None:
    recorded = steps_of(case, row)
    assert [len(steps) for steps in answer.steps] == [len(steps) for steps in recorded]
    for ours, theirs in zip(answer.steps, recorded, strict=True):
        for number, (step, expected) in enumerate(zip(ours, theirs, strict=True)):
            where = f"row {row}, step {number}"
            entropy = torch.tensor(expected["entropy"])
            assert float((step.entropy_C - entropy).abs().max()) <= ENTROPY_TOLERANCE, where
            assert abs(float(step.entropy_C.mean()) - expected["mean_entropy"]) <= ENTROPY_TOLERANCE, where
            assert step.accepted_C.nonzero().flatten().tolist() == sorted(expected["accepted_positions"]), (
                where
            )
            assert step.argmax_C.tolist() == expected["argmax"], where
            assert step.sampled_C.tolist() == expected["sampled"], where
            if not expected["stop"]:
                assert step.next_C.tolist() == expected["canvas_next"], where
            temperature = rules_of(case).temperature(expected["step_remaining"])
            assert temperature == pytest.approx(expected["temperature"], rel=1e-4)
    assert answer.ids == case["output_ids"][row]


@pytest.mark.parametrize("page_size", [4, 256])
@pytest.mark.parametrize("path", CASES, ids=case_id)
def test_recorded_noise_gives_every_recorded_step(path: Path, page_size: int) -> None:
    case: dict[str, Any] = json.loads(path.read_text())
    model, params = load_gemma(path.parent), case["params"]
    assert case["prompt_ids"]
    for row, prompt in enumerate(case["prompt_ids"]):
        answer = decode(
            model,
            prompt,
            rules_of(case),
            RecordedNoise(case, row),
            max_new_tokens=params["max_new_tokens"],
            stop_ids=params["eos_token_id"],
            pad_id=params["pad_token_id"],
            page_size=page_size,
        )
        assert_same_steps(answer, case, row)
        if len(case["prompt_ids"]) == 1:
            assert sum(len(steps) for steps in answer.steps) == case["decoder_forwards"]
            assert answer.num_encodes == case["encoder_forwards"]


@pytest.mark.parametrize("path", CASES, ids=case_id)
def test_a_generator_seeded_like_the_reference_gives_every_recorded_step(path: Path) -> None:
    case: dict[str, Any] = json.loads(path.read_text())
    if len(case["prompt_ids"]) > 1:
        pytest.skip(f"{case_id(path)} draws for {len(case['prompt_ids'])} rows from one generator")
    model, params = load_gemma(path.parent), case["params"]
    answer = decode(
        model,
        case["prompt_ids"][0],
        rules_of(case),
        SeededLikeTheReference(case, model.vocab_size),
        max_new_tokens=params["max_new_tokens"],
        stop_ids=params["eos_token_id"],
        pad_id=params["pad_token_id"],
    )
    assert_same_steps(answer, case, 0)


def test_the_bundled_traces_are_found() -> None:
    if golden_root() != DATA:
        pytest.skip(
            f"other cases were asked for: {len(CASES)} traces of diffusion_gemma under {golden_root()}"
        )
    names = ["argmax_draw", "batch2", "deterministic", "eos", "seeded", "stability2", "tight_bound"]
    assert [case_id(path) for path in CASES] == [*(f"c16-{name}" for name in names), "c256-argmax_draw"]
