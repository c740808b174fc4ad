from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from diffulex.utils.device import (
    MemoryFacts,
    device_facts,
    dtype_for,
    free_memory,
    memory_facts,
    resolve_device,
    resolve_dtype,
    synchronize,
)
from diffulex.vllm_compat import has_vllm


@dataclass(frozen=True)
class Choice:
    device: str = "cpu"
    dtype: str = "auto"
    device_start: int = 0
    device_ids: tuple[int, ...] = ()


def test_facts_agree_with_torch() -> None:
    facts = device_facts()
    assert facts.has_cuda == torch.cuda.is_available()
    assert facts.device_count == len(facts.names)
    assert device_facts() is facts


@pytest.mark.parametrize(
    ("choice", "rank", "device"),
    [
        (Choice(), 0, "cpu"),
        (Choice(device="cuda"), 0, "cuda:0"),
        (Choice(device="cuda", device_start=2), 1, "cuda:3"),
        (Choice(device="cuda", device_ids=(5, 1)), 1, "cuda:1"),
    ],
)
def test_a_rank_has_its_device(choice: Choice, rank: int, device: str) -> None:
    assert resolve_device(choice, rank) == torch.device(device)


@pytest.mark.parametrize(
    ("device", "checkpoint", "name"),
    [
        ("cpu", "bfloat16", "float32"),
        ("cuda", "float16", "float16"),
        ("cuda", None, "bfloat16"),
        ("cuda", "float8_e4m3fn", "bfloat16"),
    ],
)
def test_auto_is_float32_on_the_cpu_and_the_checkpoints_format_on_cuda(
    device: str, checkpoint: str | None, name: str
) -> None:
    assert dtype_for(device, checkpoint) == name
    assert resolve_dtype(Choice(device=device), checkpoint) is getattr(torch, name)


def test_a_written_format_is_kept() -> None:
    assert resolve_dtype(Choice(dtype="bfloat16"), "float16") is torch.bfloat16


def test_main_memory_is_counted_in_bytes() -> None:
    facts = memory_facts(torch.device("cpu"))
    assert 2**27 < facts.total < 2**46
    assert 0 < facts.free <= facts.total
    assert 0 < free_memory(torch.device("cpu")) <= facts.total
    assert MemoryFacts(10, 4).used == 6


def test_the_cpu_needs_no_synchronization() -> None:
    values = torch.ones(3) * 2
    synchronize(torch.device("cpu"))
    assert values.tolist() == [2.0, 2.0, 2.0]


def test_vllm_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not has_vllm()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "vllm" else None)
    assert has_vllm()
