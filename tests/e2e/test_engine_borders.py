"""What the engine does at its borders: odd prompts, use after the end, outputs that nobody asked for yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from diffulex import SamplingParams
from tests.support.checkpoints import write_random_sdar
from tests.support.real_engines import PROMPTS, VOCAB, greedy, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diffulex import Diffulex


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Diffulex]:
    folder = write_random_sdar(tmp_path_factory.mktemp("net"), VOCAB, scale=0.8, seed=1)
    with make_engine(folder) as engine:
        yield engine


@pytest.mark.parametrize("prompt", [[2.7, 5.9], ["5", "6"], [True, 4], [None], None, 7, [[3]]])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(engine: Diffulex, prompt: Any) -> None:
    with pytest.raises(ValueError, match="must be text or a list of token ids"):
        engine.generate([prompt], greedy())
    assert engine.is_finished()


def test_numpy_integers_are_token_ids(engine: Diffulex) -> None:
    ids = PROMPTS[2]
    plain, numbers = engine.generate([ids, np.array(ids)], greedy()).trajectories
    assert numbers.token_ids == plain.token_ids


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], "greedy", [None]])
def test_parameters_of_another_type_are_refused(engine: Diffulex, params: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        engine.generate([PROMPTS[0]], params)
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        engine.add_request(PROMPTS[0], params)


def test_a_request_of_others_that_ends_during_generate_is_reported_by_the_next_step(engine: Diffulex) -> None:
    foreign = engine.add_request(PROMPTS[1], SamplingParams(0.0, 1))
    engine.generate([PROMPTS[3]], greedy(30, ignore_eos=True))
    assert not engine.is_finished()
    (output,) = engine.step().finished
    assert (output.req_id, output.num_output_tokens) == (foreign, 1)
    assert engine.is_finished()


def test_the_first_token_never_comes_after_the_end(engine: Diffulex) -> None:
    params = [greedy(1), greedy(4, ignore_eos=True), greedy(30, ignore_eos=True)]
    for output in engine.generate(PROMPTS[:3], params).trajectories:
        assert output.first_token_time is not None
        assert output.arrival_time <= output.first_token_time <= output.finish_time


def test_an_engine_that_has_exited_says_so(tmp_path: Path) -> None:
    engine = make_engine(write_random_sdar(tmp_path, VOCAB))
    engine.exit()
    calls = [lambda: engine.add_request(PROMPTS[0]), engine.step, lambda: engine.generate([PROMPTS[0]])]
    for call in calls:
        with pytest.raises(RuntimeError, match="the engine has exited"):
            call()
