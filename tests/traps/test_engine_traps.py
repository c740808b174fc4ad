"""Faults that users reported in engines of this kind; each test carries the number of its report."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex import Diffulex, SamplingParams
from diffulex.config import ConfigError
from diffulex.engine import kv_cache_manager, model_runner
from diffulex.utils.checkpoint import CheckpointError
from tests.support.checkpoints import write_random_sdar, write_stub
from tests.support.engines import Twist
from tests.support.full_forward import block_causal_ends, full_logits
from tests.support.real_engines import (
    EOS_ID,
    MASK_ID,
    PROMPTS,
    VOCAB,
    essence,
    greedy,
    make_engine,
    run_all,
)
from tests.support.reference_loop import LoopRules, block_diffusion
from tests.support.tables import answer, table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diffulex.utils.output import RequestOutput, StepReport


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random network whose answers differ, some of which end with EOS."""
    return write_random_sdar(tmp_path_factory.mktemp("net"), VOCAB, scale=0.8, seed=1)


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer beside no network; answers come from tables."""
    return str(write_stub(tmp_path_factory.mktemp("stub"), 23, mask_id=0, eos_ids=(1, 2)))


@pytest.fixture(autouse=True)
def restore_twist() -> Iterator[None]:
    yield
    Twist.table = None


@pytest.fixture(scope="session")
def alone(net: Path) -> list[RequestOutput]:
    """The answers to `PROMPTS`, one request at a time, nothing cached."""
    with make_engine(net, max_num_reqs=1, enable_prefix_caching=False) as engine:
        return [engine.generate([prompt], greedy()).trajectories[0] for prompt in PROMPTS]


def table_engine(stub: str, logits: torch.Tensor, **settings: Any) -> Diffulex:
    """An engine that answers from a table of logits by position."""
    Twist.table = logits
    return make_engine(stub, decoding_strategy="fake", **settings)  # type: ignore[arg-type]


# Batching invariance and numerics ------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_reqs", [1, 2, 3, 8])
def test_b01_answers_depend_neither_on_the_batch_size_nor_on_the_order_of_prompts(
    net: Path, alone: list[RequestOutput], max_num_reqs: int
) -> None:
    with make_engine(net, max_num_reqs=max_num_reqs) as engine:
        for seed in range(3):
            order = list(range(len(PROMPTS)))
            random.Random(seed).shuffle(order)
            outputs = engine.generate([PROMPTS[index] for index in order], greedy()).trajectories
            for index, output in zip(order, outputs, strict=True):
                assert essence(output) == essence(alone[index])
    assert {output.completion_reason for output in alone} == {"eos_token_generated", "max_new_tokens_reached"}


def test_b02_returned_ids_hold_generated_tokens_only(net: Path) -> None:
    prompts = [PROMPTS[4][:5], PROMPTS[6]]
    assert [len(prompt) for prompt in prompts] == [5, 9]
    for prompt, output in zip(prompts, run_all(net, prompts, greedy(11, ignore_eos=True)), strict=True):
        assert len(output.token_ids) == 11
        assert MASK_ID not in output.full_token_ids
        assert output.token_ids[: len(prompt)] != prompt
        assert output.text == " ".join(f"w{i}" for i in output.token_ids if i != EOS_ID)
        assert (output.num_prompt_tokens, output.num_output_tokens) == (len(prompt), 11)


@pytest.mark.parametrize("page_size", [4, 8, 16, 32])
def test_b03_prompts_of_other_lengths_run_together_and_equal_their_single_runs(
    net: Path, alone: list[RequestOutput], page_size: int
) -> None:
    outputs = run_all(net, PROMPTS, page_size=page_size)
    assert [essence(output) for output in outputs] == [essence(output) for output in alone]


def test_b04_a_request_that_is_done_leaves_at_once(net: Path, alone: list[RequestOutput]) -> None:
    steps: dict[int, int] = {}
    left: list[int] = []

    def note(report: StepReport) -> None:
        left.append(report.num_running)
        for output in report.finished:
            steps[output.num_prompt_tokens] = report.step_id

    with make_engine(net, max_num_reqs=2) as engine:
        outputs = engine.generate(
            [PROMPTS[0], PROMPTS[1], PROMPTS[2]], [greedy(1), greedy(24), greedy(24)], on_step=note
        ).trajectories
    easy, hard, third = outputs
    # The easy one ends after its own forwards, and the next in line takes its place in the step after.
    assert steps[len(PROMPTS[0])] == easy.nfe.total - 1
    assert steps[len(PROMPTS[1])] == hard.nfe.total - 1
    assert steps[len(PROMPTS[2])] == easy.nfe.total + third.nfe.total - 1
    assert easy.nfe.total < hard.nfe.total
    assert left[easy.nfe.total - 1 : easy.nfe.total + 1] == [1, 2]
    assert (essence(hard), essence(third)) == (essence(alone[1]), essence(alone[2]))


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
def test_b05_confidence_is_taken_at_temperature_one_whatever_the_temperature(
    net: Path, temperature: float
) -> None:
    prompt = PROMPTS[2]
    params = SamplingParams(temperature, 12, seed=4, ignore_eos=True)
    with make_engine(net, save_trace=True, buffer_size=1) as engine:
        output = engine.generate([prompt], params).trajectories[0]
        tokens = [*prompt] + [MASK_ID] * 12
        checked = 0
        for record in output.trajectory:
            end = record.end
            logits = full_logits(engine.runner.model, tokens[:end], block_causal_ends(end, 4))
            prob = logits.softmax(-1)
            for position, token, confidence in record.filled:
                assert confidence == pytest.approx(prob[position, token].item(), abs=1e-4)
                if temperature == 0:
                    row = logits[position].clone()
                    row[MASK_ID] = float("-inf")
                    assert token == int(row.argmax())
                tokens[position] = token
                checked += 1
        assert checked == output.num_decoded_tokens == 12


def test_b05_of_equally_sure_positions_the_first_is_filled(stub: str) -> None:
    with table_engine(stub, table({}, rest=(5, 0.4)), buffer_size=1, save_trace=True) as engine:
        output = engine.generate([[7] * 4], greedy(4)).trajectories[0]
    assert [record.filled[0][0] for record in output.trajectory] == [4, 5, 6, 7]


def test_b06_a_request_with_nan_logits_fails_by_name_and_harms_nobody(
    net: Path, alone: list[RequestOutput]
) -> None:
    # A token that stands in no other prompt and no answer.
    used = {token for prompt in PROMPTS for token in prompt}
    used |= {token for output in alone for token in output.full_token_ids}
    poison = max(set(range(2, VOCAB)) - used)
    prompts = [*PROMPTS[:2], [*PROMPTS[2][:6], poison, 5, 9], *PROMPTS[3:5]]
    with make_engine(net) as engine:
        weights = engine.runner.model.state_dict()
        (table_name,) = [name for name in weights if "embed" in name]
        weights[table_name][poison] = float("nan")
        outputs = engine.generate(prompts, greedy()).trajectories
        bad = outputs.pop(2)
        assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "")
        assert bad.error is not None
        assert bad.error.startswith("request 2, step 0: the logits at position 9 are not finite")
        assert bad.nfe.total == 1
        assert [essence(one) for one in outputs] == [essence(alone[i]) for i in (0, 1, 3, 4)]
        # The pages that held NaN serve others afterwards.
        for _ in range(3):
            again = engine.generate(PROMPTS, greedy()).trajectories
            assert [essence(one) for one in again] == [essence(one) for one in alone]
        pool = engine.scheduler.kv_cache_manager.pool
        assert pool.num_free == pool.num_pages


def test_b06_a_weight_that_is_nan_is_refused_by_name(net: Path, tmp_path: Path) -> None:
    folder = write_random_sdar(tmp_path / "nan", VOCAB)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        make_engine(folder)


def test_b07_the_number_of_threads_changes_no_token(net: Path, alone: list[RequestOutput]) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert [essence(one) for one in run_all(net, PROMPTS)] == [essence(one) for one in alone]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("buffer_size", [1, 2, 4])
def test_b08_the_cached_engine_equals_the_plain_loop_over_the_same_weights(
    net: Path, buffer_size: int
) -> None:
    with make_engine(net, buffer_size=buffer_size) as engine:
        outputs = engine.generate(PROMPTS, greedy()).trajectories
        model = engine.runner.model

        def predict(tokens: Any, ends: Any) -> Any:
            logits = full_logits(model, tokens.tolist(), torch.from_numpy(ends).int())
            allowed = logits.clone()
            allowed[:, MASK_ID] = float("-inf")
            chosen = allowed.argmax(-1)
            prob = (logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).exp()
            return chosen.numpy(), prob.numpy()

        for prompt, output in zip(PROMPTS, outputs, strict=True):
            rules = LoopRules(4, buffer_size, MASK_ID, (EOS_ID,), accept=0.6, max_tokens=24)
            wanted = block_diffusion(prompt, rules, predict)
            assert essence(output) == (wanted.output_ids, wanted.reason, wanted.num_denoise)


# EOS, stop, length ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_b11_an_answer_of_nothing_but_eos_is_an_empty_stop(stub: str, buffer_size: int) -> None:
    with table_engine(stub, table(answer(4, [1, 2, 1, 1])), buffer_size=buffer_size) as engine:
        output = engine.generate([[7] * 4], greedy()).trajectories[0]
    assert (output.text, output.token_ids, output.num_output_tokens) == ("", [], 0)
    assert (output.finish_reason, output.completion_reason) == ("stop", "eos_token_generated")
    assert (output.nfe.total, output.tpf, output.num_unfilled) == (1, 0.0, 0)


@pytest.mark.parametrize("buffer_size", [1, 2, 4])
def test_b13_blocks_behind_an_early_stop_are_discarded_and_not_counted(stub: str, buffer_size: int) -> None:
    predictions = answer(4, [5, 6], 0.3) | answer(6, [1, 8]) | answer(8, [9] * 12)
    settings = {"buffer_size": buffer_size, "add_block_threshold": 0.0, "save_trace": True}
    with table_engine(stub, table(predictions), **settings) as engine:
        output = engine.generate([[7] * 4], greedy()).trajectories[0]
    assert (output.token_ids, output.completion_reason) == ([5, 6], "eos_token_generated")
    assert output.full_token_ids[:4] == [5, 6, 1, 8]
    assert output.tpf == 2 / output.nfe.total
    # The stop is found in the first forward; no later one reaches beyond its block.
    assert {record.end for record in output.trajectory[1:]} == {8}


@pytest.mark.parametrize("stop", [" w8 w9", ["w20", " w8 w9"]])
def test_b15_a_stop_string_may_span_tokens_and_blocks_and_be_one_text(stub: str, stop: Any) -> None:
    # The string begins with the last token of the first block.
    tokens = [5, 6, 10, 8, 9, 20, 11, 12]
    with table_engine(stub, table(answer(4, tokens)), buffer_size=1) as engine:
        output = engine.generate([[7] * 4], greedy(stop=stop)).trajectories[0]
    assert (output.text, output.token_ids) == ("w5 w6 w10", [5, 6, 10])
    assert (output.finish_reason, output.completion_reason) == ("stop", "stop_string")


def test_b15_the_earliest_match_wins_over_the_order_of_the_list(stub: str) -> None:
    with table_engine(stub, table(answer(4, [5, 6, 10, 8]))) as engine:
        output = engine.generate([[7] * 4], greedy(stop=["w10", "6"])).trajectories[0]
    # A token that begins before the cut belongs to the answer.
    assert (output.text, output.token_ids) == ("w5 w", [5, 6])


def test_b17_stop_strings_count_behind_the_thinking_part_only(tmp_path: Path) -> None:
    folder = write_stub(tmp_path, 23, mask_id=0, eos_ids=(1, 2))
    names = {"w10": "<think>", "w11": "</think>", "w12": "STOP"}
    spec = json.loads((folder / "tokenizer.json").read_text())
    words = spec["model"]["vocab"]
    spec["model"]["vocab"] = {names.get(word, word): number for word, number in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokens = [10, 5, 12, 6, 11, 8, 12, 9]
    with table_engine(str(folder), table(answer(4, tokens))) as engine:
        output = engine.generate([[7] * 4], greedy(stop=" STOP", stop_after="</think>")).trajectories[0]
        plain = engine.generate([[7] * 4], greedy(stop=" STOP")).trajectories[0]
    assert output.text == "<think> w5 STOP w6 </think> w8"
    assert output.finish_reason == "stop"
    assert plain.text == "<think> w5"


def test_b19_a_prompt_longer_than_the_model_is_refused_with_both_numbers(net: Path) -> None:
    with make_engine(net, max_model_len=64) as engine:
        with pytest.raises(ValueError, match="the prompt has 74 tokens, max_model_len is 64"):
            engine.add_request([5] * 74)
        with pytest.raises(ValueError, match="prompt 1: the prompt has 74 tokens"):
            engine.generate([[5] * 4, [5] * 74], greedy())
        assert engine.is_finished()


# KV cache, scheduling, memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_b27_preempted_requests_answer_as_if_nothing_had_happened(
    net: Path, alone: list[RequestOutput], caching: bool
) -> None:
    picked = [3, 4, 5]
    outputs = run_all(net, [PROMPTS[i] for i in picked], num_pages=12, enable_prefix_caching=caching)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert outputs[0].num_preemptions == 0
    assert [essence(one) for one in outputs] == [essence(alone[i]) for i in picked]
    lost = [one for one in outputs if one.num_preemptions]
    assert all(one.num_forward_tokens > alone[picked[one.req_id]].num_forward_tokens for one in lost)


def test_b28_four_requests_in_a_pool_for_little_more_than_one_all_end(
    net: Path, alone: list[RequestOutput]
) -> None:
    picked = [4, 7, 3, 5]
    # 33 + 24 positions are eight pages; nine are 1.1 times that.
    outputs = run_all(net, [PROMPTS[i] for i in picked], num_pages=9)
    assert [essence(one) for one in outputs] == [essence(alone[i]) for i in picked]
    assert outputs[0].num_preemptions == 0


def test_b28_pages_with_equal_digests_are_told_apart_by_their_tokens(
    net: Path, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_manager, "page_digest", lambda *_: b"the same")
    with make_engine(net) as engine:
        for _ in range(2):
            outputs = engine.generate(PROMPTS, greedy()).trajectories
            assert [essence(one) for one in outputs] == [essence(one) for one in alone]


def test_b29_memory_that_does_not_suffice_is_refused_at_the_start_with_numbers(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "free_memory", lambda _: 15_000)
    with pytest.raises(ConfigError, match=r"memory does not suffice: .*logits of \d+ rows x 64 ids"):
        make_engine(net, num_pages=-1)
    monkeypatch.setattr(model_runner, "free_memory", lambda _: 200_000)
    with make_engine(net, num_pages=-1) as engine:
        plan = engine.runner.memory_plan
        assert plan.cache_bytes + plan.logits_bytes <= 0.9 * 200_000
        assert engine.config.num_pages == plan.num_pages
        assert len(engine.generate(PROMPTS, greedy()).trajectories) == 8


def test_b49_a_request_that_can_never_fit_is_refused_and_the_others_run(net: Path) -> None:
    with make_engine(net, num_pages=4) as engine:
        with pytest.raises(ValueError, match="may need 5 KV pages"):
            engine.add_request([5] * 30, greedy(10))
        outputs = engine.generate([[5] * 30, [6] * 9], greedy(10), on_invalid="record").trajectories
    assert (outputs[0].finish_reason, outputs[0].token_ids) == ("error", [])
    assert "num_pages is 4" in (outputs[0].error or "")
    assert outputs[1].num_output_tokens == 10 or outputs[1].eos_token_generated
