"""Two ranks on the CPU (gloo): the tokens of one rank, and an orderly end whatever happens to a worker."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex import Diffulex, SamplingParams
from diffulex.config import ConfigError
from diffulex.distributed.launch import PortInUseError
from diffulex.engine.worker import WorkerError
from tests.golden.cases import DATA
from tests.support.checkpoints import write_random_sdar

if TYPE_CHECKING:
    from pathlib import Path

DENSE = DATA / "sdar" / "dense_b4_headdim"
MOE = DATA / "sdar_moe" / "moe_norm_true"
PROMPTS = [[94, 12, 32, 40, 107, 104, 6, 119, 113], [1, 2, 3], [7] * 30]


def generate(folder: Path, size: int, model_name: str = "sdar", **settings: object) -> list[list[int]]:
    with Diffulex(
        str(folder), model_name=model_name, block_size=8, page_size=8, tensor_parallel_size=size, **settings
    ) as llm:
        params = SamplingParams(0.0, 24, ignore_eos=True)
        return [output.token_ids for output in llm.generate(PROMPTS, params).trajectories]


def children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def step_to_the_end(llm: Diffulex) -> None:
    while not llm.is_finished():
        llm.step()


def test_two_ranks_decode_the_same_tokens_as_one_and_leave_no_process_behind() -> None:
    assert generate(DENSE, 2) == generate(DENSE, 1)
    assert children() == []


def test_two_ranks_that_share_every_expert_decode_the_same_tokens_as_one() -> None:
    assert generate(MOE, 2, "sdar_moe") == generate(MOE, 1, "sdar_moe")


#: Checkpoint -> model name; one with experts runs always, the rest in the long run.
FAMILIES = {
    "sdar_moe/moe_norm_true": "sdar_moe",
    "sdar/dense_b8_tied_mqa": "sdar",
    "sdar_moe/moe_norm_false_mixed_layers": "sdar_moe",
    "dream/gqa": "dream",
    "dream_reasoner/gqa": "dream_reasoner",
    "llada/mha": "llada",
    "llada/gqa": "llada",
    "fast_dllm_v2/bd8": "fast_dllm_v2",
    "llada2_mini/grouped": "llada2_mini",
    "llada2_mini/ungrouped": "llada2_mini",
}


@pytest.mark.parametrize(
    "case", [name if not i else pytest.param(name, marks=pytest.mark.long) for i, name in enumerate(FAMILIES)]
)
def test_every_family_decodes_the_same_tokens_on_two_ranks(case: str) -> None:
    folder = DATA / case
    config = json.loads((folder / "config.json").read_text())
    kv_heads = config.get("num_key_value_heads", config.get("n_kv_heads"))
    if kv_heads is not None and kv_heads % 2:
        with pytest.raises(ConfigError, match="KV heads"):
            Diffulex(str(folder), model_name=FAMILIES[case], tensor_parallel_size=2)
        return
    prompts = [[5, 9, 11, 30, 7], [8] * 17]
    tokens = []
    for size in (1, 2):
        with Diffulex(
            str(folder),
            model_name=FAMILIES[case],
            decoding_strategy="multi_bd",
            block_size=8,
            page_size=8,
            buffer_size=2,
            tensor_parallel_size=size,
        ) as llm:
            outputs = llm.generate(prompts, SamplingParams(0.0, 24, ignore_eos=True)).trajectories
            tokens.append([output.token_ids for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_b35_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path) -> None:
    folder = write_random_sdar(tmp_path, 101, num_key_value_heads=2)
    prompts_fit = all(max(prompt) < 101 for prompt in PROMPTS[1:])
    assert prompts_fit
    with Diffulex(str(folder), model_name="sdar", tensor_parallel_size=2) as llm:
        two = llm.generate(PROMPTS[1:], SamplingParams(0.0, 40)).trajectories
    with Diffulex(str(folder), model_name="sdar", tensor_parallel_size=1) as llm:
        one = llm.generate(PROMPTS[1:], SamplingParams(0.0, 40)).trajectories
    assert [output.token_ids for output in two] == [output.token_ids for output in one]


def test_b35_heads_that_do_not_divide_are_refused_by_name_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(3\).*4 attention heads.*2 KV heads"):
        generate(DENSE, 3)
    with pytest.raises(ConfigError, match="2 KV heads"):
        generate(DENSE, 4)
    assert children() == []


def test_b36_a_port_in_use_is_replaced_or_named() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"master_port {port} is in use"):
            generate(DENSE, 2, master_port=port)
    assert children() == []


def test_b36_two_engines_of_two_processes_take_different_ports_by_default() -> None:
    with closing(socket.socket()) as taken:
        # Nobody may have the default port now, or it is the other engine's.
        with suppress(OSError):
            taken.bind(("", 2333))
            taken.listen()
        assert generate(DENSE, 2) == generate(DENSE, 1)


def test_b36_one_device_needs_no_second_rank_by_default() -> None:
    with Diffulex(str(DENSE), model_name="sdar") as llm:
        assert llm.config.tensor_parallel_size == 1


def test_a_killed_worker_ends_the_run_within_seconds_with_its_rank() -> None:
    with Diffulex(str(DENSE), model_name="sdar", block_size=8, page_size=8, tensor_parallel_size=2) as llm:
        llm.add_request(PROMPTS[0], SamplingParams(0.0, 200, ignore_eos=True))
        llm.step()
        (worker,) = children()
        os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1"):
            step_to_the_end(llm)
        assert time.monotonic() - start < 60
    assert children() == []


@pytest.mark.long
def test_a_worker_that_fails_while_loading_reports_its_traceback(tmp_path: Path) -> None:
    folder = write_random_sdar(tmp_path, 64, num_key_value_heads=2)
    weights = load_file(folder / "model.safetensors")
    # The broken row belongs to rank 1 alone.
    weights["lm_head.weight"][63] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(WorkerError, match=r"(?s)rank 1 failed.*lm_head.weight"):
        Diffulex(str(folder), model_name="sdar", tensor_parallel_size=2)
    assert children() == []
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 64
