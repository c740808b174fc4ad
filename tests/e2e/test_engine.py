"""The engine as users drive it, over a small random network."""

from __future__ import annotations

import gc
import json
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from diffulex import SamplingParams
from tests.support.checkpoints import write_random_sdar
from tests.support.real_engines import MASK_ID, PROMPTS, VOCAB, essence, greedy, make_engine, run_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diffulex import Diffulex
    from diffulex.utils.output import RequestOutput, StepReport


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_sdar(tmp_path_factory.mktemp("net"), VOCAB, scale=0.8, seed=1)


@pytest.fixture
def engine(net: Path) -> Iterator[Diffulex]:
    with make_engine(net) as engine:
        yield engine
    assert engine.scheduler.is_finished()
    pool = engine.scheduler.kv_cache_manager.pool
    assert pool.num_free == pool.num_pages


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


# generate ------------------------------------------------------------------------------------------------


def test_texts_and_id_lists_give_the_same_outputs_in_prompt_order(engine: Diffulex) -> None:
    by_ids = engine.generate(PROMPTS, greedy()).trajectories
    by_text = engine.generate([words(prompt) for prompt in PROMPTS], greedy()).trajectories
    assert [essence(one) for one in by_text] == [essence(one) for one in by_ids]
    assert [one.req_id for one in by_text] == list(range(8))
    assert [one.num_prompt_tokens for one in by_ids] == [len(prompt) for prompt in PROMPTS]
    assert all(one.text == words(one.token_ids) for one in by_ids)


def test_each_prompt_may_have_its_own_parameters(engine: Diffulex) -> None:
    lengths = [1, 5, 9]
    params = [greedy(length, ignore_eos=True) for length in lengths]
    outputs = engine.generate(PROMPTS[:3], params).trajectories
    assert [one.num_output_tokens for one in outputs] == lengths
    together = engine.generate(PROMPTS[:3], greedy(9, ignore_eos=True)).trajectories
    assert together[2].token_ids == outputs[2].token_ids


def test_without_parameters_the_defaults_apply(engine: Diffulex) -> None:
    (output,) = engine.generate([PROMPTS[1]]).trajectories
    assert output.num_prompt_tokens + output.num_output_tokens == 128 or output.eos_token_generated
    assert output.max_model_len_reached or output.eos_token_generated


def test_other_numbers_of_prompts_and_parameters_are_refused(engine: Diffulex) -> None:
    with pytest.raises(ValueError, match="2 prompts came with 1 sampling_params; give one for each"):
        engine.generate(PROMPTS[:2], [greedy()])
    with pytest.raises(ValueError, match="not one string"):
        engine.generate("w5 w6", greedy())
    assert engine.generate([], greedy()).trajectories == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "the prompt is empty"), ([5, VOCAB], "token id 64 is outside the vocabulary"),
     ([-1], "token id -1 is outside"), ([5] * 128, "the prompt has 128 tokens"), ("", "the prompt is empty")],
)  # fmt: skip
def test_an_invalid_prompt_raises_before_anything_runs_or_is_recorded(
    engine: Diffulex, prompt: Any, message: str
) -> None:
    reports: list[StepReport] = []
    with pytest.raises(ValueError, match=f"prompt 1: {message}"):
        engine.generate([PROMPTS[0], prompt], greedy(), on_step=reports.append)
    assert (reports, engine.is_finished()) == ([], True)
    finished: list[int] = []
    outputs = engine.generate(
        [PROMPTS[0], prompt, PROMPTS[2]],
        greedy(),
        on_invalid="record",
        on_finish=lambda index, _: finished.append(index),
    ).trajectories
    assert [one.finish_reason for one in outputs][1] == "error"
    assert (outputs[1].req_id, message in (outputs[1].error or "")) == (1, True)
    assert essence(outputs[0]) == essence(engine.generate([PROMPTS[0]], greedy()).trajectories[0])
    assert sorted(finished) == [0, 1, 2]


def test_callbacks_see_every_step_and_every_output_once(engine: Diffulex) -> None:
    reports: list[StepReport] = []
    seen: dict[int, RequestOutput] = {}

    def note(index: int, output: RequestOutput) -> None:
        assert index not in seen
        seen[index] = output

    result = engine.generate(PROMPTS, greedy(), on_finish=note, on_step=reports.append)
    assert [seen[index] for index in range(8)] == result.trajectories
    assert [one.step_id for one in reports] == list(
        range(reports[0].step_id, reports[0].step_id + len(reports))
    )
    assert sum(len(one.finished) for one in reports) == 8
    filled = sum(one.num_tokens_filled for one in reports)
    assert filled == sum(one.num_decoded_tokens for one in result.trajectories)
    rows = sum(one.num_tokens_forwarded for one in reports)
    assert rows == sum(one.num_forward_tokens for one in result.trajectories)
    for one in reports:
        assert set(one.times) == {"schedule", "prepare", "forward", "sample", "post"}
        assert 0 < sum(one.times.values()) <= one.step_time
    assert (reports[-1].num_running, reports[-1].num_waiting) == (0, 0)
    assert result.wall_time >= sum(one.step_time for one in reports)
    totals = result.stats()
    assert totals["tokens_output"] == sum(one.num_output_tokens for one in result.trajectories)
    assert totals["tps"] * totals["wall_time"] == pytest.approx(totals["tokens_output"])
    assert sum(totals["completion_reasons"].values()) == 8


def test_times_of_an_output_follow_one_another(engine: Diffulex) -> None:
    for output in engine.generate(PROMPTS, greedy()).trajectories:
        assert output.first_token_time is not None
        assert output.arrival_time < output.first_token_time
        assert output.finish_time > output.arrival_time


def test_the_time_of_the_first_token_is_not_that_of_a_prefill(engine: Diffulex) -> None:
    engine.scheduler.max_num_batched_tokens = 16
    req_id = engine.add_request(PROMPTS[1], greedy())
    for _ in range(2):
        engine.step()
    engine.abort_request(req_id)
    (output,) = engine.step().finished
    assert (output.nfe.prefill, output.nfe.total, output.first_token_time) == (2, 2, None)


def test_the_progress_bar_goes_to_stderr(
    engine: Diffulex, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    engine.generate(PROMPTS[:2], greedy(4), use_tqdm=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "requests" in shown.err


def test_an_interrupt_keeps_what_is_finished_and_frees_everything(engine: Diffulex) -> None:
    seen: dict[int, RequestOutput] = {}

    def interrupt(index: int, output: RequestOutput) -> None:
        seen[index] = output
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, greedy(), on_finish=interrupt)
    assert len(seen) == 2
    assert engine.is_finished()
    pool = engine.scheduler.kv_cache_manager.pool
    assert pool.num_free == pool.num_pages
    again = engine.generate(PROMPTS, greedy()).trajectories
    assert all(essence(again[index]) == essence(output) for index, output in seen.items())


def test_a_request_aborted_from_a_callback_is_an_output_and_ends_the_loop(engine: Diffulex) -> None:
    wanted = run_all_of(engine, PROMPTS[:1])
    last_id = engine.add_request(PROMPTS[0], greedy(1))
    while not engine.is_finished():
        engine.step()

    def abort_second(report: StepReport) -> None:
        if report.num_running == 2:
            assert engine.abort_request(last_id + 2) is True

    outputs = engine.generate([PROMPTS[0], PROMPTS[1]], greedy(), on_step=abort_second).trajectories
    assert [one.finish_reason for one in outputs][1] == "abort"
    assert outputs[1].completion_reason == "aborted"
    assert MASK_ID not in outputs[1].token_ids
    assert essence(outputs[0]) == wanted[0]


def run_all_of(engine: Diffulex, prompts: list[list[int]]) -> list[Any]:
    return [essence(one) for one in engine.generate(prompts, greedy()).trajectories]


# Steps ---------------------------------------------------------------------------------------------------


def test_steps_give_the_outputs_that_generate_gives(engine: Diffulex) -> None:
    wanted = run_all_of(engine, PROMPTS)
    ids = [engine.add_request(prompt, greedy()) for prompt in PROMPTS[:5]]
    got: dict[int, RequestOutput] = {}
    for late in PROMPTS[5:]:
        got |= {one.req_id: one for one in engine.step().finished}
        ids.append(engine.add_request(late, greedy()))
    assert not engine.is_finished()
    while not engine.is_finished():
        got |= {one.req_id: one for one in engine.step().finished}
    assert [essence(got[req_id]) for req_id in ids] == wanted
    assert ids == sorted(set(ids))


def test_a_step_without_requests_reports_nothing(engine: Diffulex) -> None:
    report = engine.step()
    assert (report.num_tokens_forwarded, report.num_running, report.finished) == (0, 0, ())


def test_an_abort_ends_a_request_once_and_the_next_step_reports_it(engine: Diffulex) -> None:
    running = engine.add_request(PROMPTS[1], greedy())
    kept = engine.add_request(PROMPTS[2], greedy())
    engine.step()
    pool = engine.scheduler.kv_cache_manager.pool
    before = pool.num_free
    assert engine.abort_request(running) is True
    assert pool.num_free > before
    assert engine.abort_request(running) is False
    assert engine.abort_request(10_000) is False
    report = engine.step()
    assert [(one.req_id, one.finish_reason) for one in report.finished] == [(running, "abort")]
    finished: list[RequestOutput] = []
    while not engine.is_finished():
        finished += engine.step().finished
    assert [one.req_id for one in finished] == [kept]
    assert essence(finished[0]) == run_all_of(engine, [PROMPTS[2]])[0]


def test_an_abort_of_the_last_request_is_reported_by_an_empty_step(engine: Diffulex) -> None:
    req_id = engine.add_request(PROMPTS[1], greedy())
    assert engine.abort_request(req_id) is True
    assert not engine.is_finished()
    assert [one.req_id for one in engine.step().finished] == [req_id]
    assert engine.step().finished == ()


def test_requests_of_others_run_along_and_stay_out_of_the_outputs(engine: Diffulex) -> None:
    wanted = run_all_of(engine, PROMPTS[:3])
    quick = engine.add_request(PROMPTS[5], greedy(max_nfe=1))  # ends while the others run
    foreign = engine.add_request(PROMPTS[4], greedy(100, ignore_eos=True))
    outputs = engine.generate(PROMPTS[:3], greedy()).trajectories
    assert [essence(one) for one in outputs] == wanted
    assert not engine.is_finished()
    finished: list[RequestOutput] = []
    while not engine.is_finished():
        finished += engine.step().finished
    assert [one.req_id for one in finished] == [quick, foreign]
    assert finished[1].num_output_tokens == 95


# Life ----------------------------------------------------------------------------------------------------


def test_two_engines_of_one_process_do_not_disturb_each_other(net: Path, tmp_path: Path) -> None:
    other_net = write_random_sdar(tmp_path, VOCAB, scale=0.8, seed=2)
    wanted = [essence(one) for one in run_all(net, PROMPTS[:3])]
    other = [essence(one) for one in run_all(other_net, PROMPTS[:3], block_size=8, page_size=16)]
    assert wanted != other
    with make_engine(net) as first, make_engine(other_net, block_size=8, page_size=16) as second:
        got: list[dict[int, Any]] = [{}, {}]
        for engine in (first, second):
            for prompt in PROMPTS[:3]:
                engine.add_request(prompt, greedy())
        while not (first.is_finished() and second.is_finished()):
            for place, engine in enumerate((first, second)):
                got[place] |= {one.req_id: essence(one) for one in engine.step().finished}
        assert [got[0][i] for i in range(3)] == wanted
        assert [got[1][i] for i in range(3)] == other


def test_exit_may_be_called_twice_and_the_context_manager_calls_it(net: Path) -> None:
    with make_engine(net) as engine:
        model = weakref.ref(engine.runner.model)
    gc.collect()
    assert model() is None
    engine.exit()
    engine.exit()


def test_the_mask_id_inside_a_prompt_is_a_literal_token(engine: Diffulex) -> None:
    prompt = [5, MASK_ID, 9, MASK_ID, MASK_ID, 7, MASK_ID]
    (output,) = engine.generate([prompt], greedy(10, ignore_eos=True)).trajectories
    assert output.num_output_tokens == 10
    assert MASK_ID not in output.full_token_ids
    assert output.num_prompt_tokens == 7
    (other,) = engine.generate([[5, 6, 9, 6, 6, 7, 6]], greedy(10, ignore_eos=True)).trajectories
    assert other.token_ids != output.token_ids


def test_a_profile_holds_the_parts_of_every_step(net: Path, tmp_path: Path) -> None:
    profile = {"activities": ["cpu"], "torch_profiler_dir": str(tmp_path), "run_id": "mine"}
    with make_engine(net, profiler_config=profile) as engine:
        reports: list[StepReport] = []
        engine.generate(PROMPTS[:1], greedy(4), on_step=reports.append)
    (trace,) = tmp_path.glob("mine*.json")
    names = [str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]]
    for part in ("schedule", "prepare", "forward", "sample", "post"):
        assert names.count(part) == len(reports)


# Traces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_a_trace_has_one_record_a_forward_and_tells_every_position(net: Path, buffer_size: int) -> None:
    outputs = run_all(net, PROMPTS, save_trace=True, buffer_size=buffer_size, num_pages=24)
    assert any(one.num_preemptions for one in outputs)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        records = output.trajectory
        assert len(records) == output.nfe.total
        for kind in ("prefill", "denoise", "store", "rebuild"):
            assert sum(record.kind == kind for record in records) == output.nfe.as_dict()[kind]
        filled = [entry for record in records for entry in record.filled]
        assert len(filled) == output.num_decoded_tokens
        assert sum(record.num_generated_tokens for record in records) == len(filled)
        assert len({position for position, _, _ in filled}) == len(filled)
        tokens = {position: token for position, token, _ in filled}
        assert [tokens[len(prompt) + i] for i in range(len(output.token_ids))] == output.token_ids
        assert sum(record.end - record.start for record in records) == output.num_forward_tokens
        assert [record.step_id for record in records] == sorted({record.step_id for record in records})
        for record in records:
            assert len(record.running_token_ids) == 4 * len(record.block_trace)
            masks = sum(block.num_mask_tokens for block in record.block_trace)
            assert masks == record.running_token_ids.count(MASK_ID)
            assert all(block.progress == 1 - block.num_mask_tokens / 4 for block in record.block_trace)


def test_without_save_trace_nothing_is_kept(engine: Diffulex) -> None:
    assert engine.generate(PROMPTS[:1], greedy()).trajectories[0].trajectory == []


# Draws ---------------------------------------------------------------------------------------------------


def test_a_seeded_request_draws_the_same_in_any_company(net: Path) -> None:
    params = [SamplingParams(0.8, 20, seed=index, top_p=0.95, top_k=20) for index in range(8)]
    alone: list[list[int]] = []
    for prompt, one in zip(PROMPTS, params, strict=True):
        alone += [output.token_ids for output in run_all(net, [prompt], one, max_num_reqs=1)]
    assert [one.token_ids for one in run_all(net, PROMPTS, params)] == alone
    tight = run_all(net, PROMPTS[::-1], params[::-1], num_pages=24, enable_prefix_caching=False)
    assert [one.token_ids for one in tight[::-1]] == alone
    with make_engine(net, page_size=4) as engine:
        engine.generate(PROMPTS, greedy())
        again = engine.generate(PROMPTS, params).trajectories
        assert [one.token_ids for one in again] == alone
        assert any(one.num_cached_tokens for one in again)


def test_the_engine_seed_decides_where_a_request_gives_none(net: Path) -> None:
    hot = SamplingParams(1.0, 20)
    first, again, other = (
        [one.token_ids for one in run_all(net, PROMPTS[:3], hot, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_temperature_zero_is_the_limit_of_small_temperatures(net: Path) -> None:
    small = SamplingParams(1e-6, 24, seed=3)
    assert [essence(a) for a in run_all(net, PROMPTS, small)] == [essence(b) for b in run_all(net, PROMPTS)]
