from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from diffulex.profiling import Profiler, ProfilerSettings
from diffulex.settings.spec import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def run(profiler: Profiler, num_steps: int) -> list[bool]:
    """Whether each of the steps was recorded."""
    import torch

    active = []
    with profiler:
        for number in range(num_steps):
            active.append(profiler.is_active)
            with profiler.span(f"step-{number}"):
                torch.ones(4).sum()
            profiler.step()
    return active


def span_names(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("step-")}


def test_without_options_nothing_is_recorded() -> None:
    profiler = Profiler(None)
    assert isinstance(profiler.span("x"), nullcontext)
    assert run(profiler, 2) == [False, False]
    assert profiler.trace_files == []


def test_a_session_writes_one_trace_with_the_named_spans(tmp_path: Path) -> None:
    profiler = Profiler(
        {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "new"), "run_id": "a"}, rank=2
    )
    assert run(profiler, 3) == [True, True, True]
    assert profiler.trace_files == [tmp_path / "new" / "a_rank2_0.json"]
    assert span_names(profiler.trace_files[0]) == {"step-0", "step-1", "step-2"}


def test_delay_and_limit_choose_the_recorded_steps(tmp_path: Path) -> None:
    profiler = Profiler({"torch_profiler_dir": str(tmp_path), "delay_iterations": 2, "max_iterations": 2})
    assert run(profiler, 6) == [False, False, True, True, False, False]
    (path,) = profiler.trace_files
    assert span_names(path) == {"step-2", "step-3"}


def test_a_schedule_writes_one_trace_for_each_cycle(tmp_path: Path) -> None:
    schedule = {"warmup": 1, "active": 1, "repeat": 2}
    profiler = Profiler({"activities": ["cpu"], "torch_profiler_dir": str(tmp_path), "schedule": schedule})
    run(profiler, 6)
    assert [path.name for path in profiler.trace_files] == ["rank0_0.json", "rank0_1.json"]
    assert [span_names(path) for path in profiler.trace_files] == [{"step-1"}, {"step-3"}]


def test_stopping_twice_writes_once(tmp_path: Path) -> None:
    profiler = Profiler({"torch_profiler_dir": str(tmp_path)})
    profiler.start()
    profiler.start()
    profiler.stop()
    profiler.stop()
    assert len(profiler.trace_files) == 1
    assert not profiler.is_active


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"profiler": "torch"}, "torch_profiler_dir must be a folder when profiler is written"),
        ({"profiler": "nsys"}, "profiler must be one of torch, got 'nsys'"),
        ({"activities": ["gpu"]}, "activities must be one of cpu, cuda, got 'gpu'"),
        ({"activities": []}, "activities must name cpu or cuda"),
        ({"delay_iterations": -1}, "delay_iterations must be at least 0, got -1"),
        ({"record_shapes": 1}, "record_shapes must be true or false, got 1"),
        ({"recordshapes": True}, "unknown setting 'recordshapes'; did you mean 'record_shapes'"),
        ({"schedule": {"wait": 1}}, "schedule must say how many steps are active"),
        ({"schedule": {"active": 0}}, "schedule: active must be a whole number of at least 1, got 0"),
        (
            {"schedule": {"active": 1, "wait": -1}},
            "schedule: wait must be a whole number of at least 0, got -1",
        ),
        ({"schedule": {"active": 1, "wayt": 1}}, "schedule: unknown setting 'wayt'; did you mean 'wait'"),
        ({"schedule": {"active": 1}, "max_iterations": 2}, "max_iterations has no effect beside schedule"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerSettings.from_mapping(options)
    (problem,) = caught.value.problems
    assert problem.startswith(f"profiler_config: {sentence}")


def test_cuda_is_wanted_by_either_spelling() -> None:
    assert ProfilerSettings.from_mapping({"use_cuda": True}).wants_cuda
    assert ProfilerSettings.from_mapping({"activities": ["cpu", "cuda"]}).wants_cuda
    assert not ProfilerSettings.from_mapping({"activities": "cpu"}).wants_cuda
