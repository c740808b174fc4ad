import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diffulex.settings.layers import Layer, layer_of, merge
from diffulex.settings.sections import ENGINE_SECTIONS
from diffulex.settings.sources import load_yaml, read_layer
from diffulex.settings.spec import ConfigError, setting


@dataclass(frozen=True)
class Evaluation:
    dataset_name: str = setting("gsm8k", help="h")
    temperature: float = setting(0.0, help="h", low=0)
    max_tokens: int = setting(256, help="h", low=1)
    extra: Mapping[str, object] | None = setting(None, help="h")


SECTIONS: dict[str, Any] = {"engine": ENGINE_SECTIONS, "eval": (Evaluation,)}


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(folder: Path, text: str, *overrides: str) -> Layer:
    return load_yaml([write(folder, text)], overrides, SECTIONS)


def faults(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return [fault.replace(f"{folder}/", "") for fault in caught.value.problems]


def test_values_come_with_file_and_line(tmp_path: Path) -> None:
    layer = load(tmp_path, "# run\nengine:\n  model_path: m\n  block_size: 8\neval:\n  temperature: 0\n")
    assert layer.values == {"engine": {"model": "m", "block_size": 8}, "eval": {"temperature": 0.0}}
    assert layer.origins["engine"] == {
        "model": f"yaml {tmp_path}/run.yaml:3",
        "block_size": f"yaml {tmp_path}/run.yaml:4",
    }
    assert layer.origins["eval"] == {"temperature": f"yaml {tmp_path}/run.yaml:6"}


def test_no_files_and_no_overrides_give_an_empty_layer() -> None:
    assert load_yaml([], [], SECTIONS) == Layer()


def test_an_empty_section_holds_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, "engine:\neval:\n  max_tokens: 4\n").values == {
        "engine": {},
        "eval": {"max_tokens": 4},
    }


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "engine:\n  blok_size: 8\n",
            "run.yaml:2: unknown setting 'blok_size'; did you mean 'block_size'? (sec",
        ),
        (
            "engine:\n  accept_treshold: 0.5\n",
            "run.yaml:2: unknown setting 'accept_treshold'; did you mean 'accept_threshold'?",
        ),
        ("engine:\n  block_size: '16'\n", "run.yaml:2: block_size must be a whole number, got '16'"),
        ("engine:\n  block_size: sixteen\n", "run.yaml:2: block_size must be a whole number, got 'sixteen'"),
        ("engine:\n  block_size: 5\n", "run.yaml:2: block_size must be one of 4, 8, 16, 32, 256, got 5"),
        (
            "engine:\n  enable_prefix_caching: 1\n",
            "run.yaml:2: enable_prefix_caching must be true or false, got 1",
        ),
        ("engine:\n  model_name: no\n", "run.yaml:2: model_name must be a text, got False"),
        ("engine:\n  block_size:\n", "run.yaml:2: block_size must be a whole number, got None"),
        ("eval:\n  temperature: warm\n", "run.yaml:2: temperature must be a finite number, got 'warm'"),
        (
            "engine:\n  block_size: 8\n  page_size: 8\n  block_size: 16\n",
            "run.yaml:4: engine.block_size stands twice, first in line 2",
        ),
        (
            "engine:\n  block_size: 8\neval:\n  max_tokens: 1\nengine:\n  page_size: 8\n",
            "run.yaml:5: engine stands twice, first in line 1",
        ),
        (
            "engin:\n  block_size: 8\n",
            "run.yaml:1: unknown section 'engin'; did you mean 'engine'?; sections are engine, eval",
        ),
        ("block_size: 8\n", "run.yaml:1: block_size stands outside a section; move it under engine:"),
        (
            "engine:\n  temperature: 0.5\n",
            "run.yaml:2: temperature is a setting of eval, not of engine; move it under eval:",
        ),
        (
            "eval:\n  model_path: x\n",
            "run.yaml:2: model is a setting of engine, not of eval; move it under engine:",
        ),
        ("engine: 5\n", "run.yaml:1: engine must hold settings, it holds 5"),
        ("- a\n- b\n", "run.yaml must hold sections such as engine: and eval:, it holds ['a', 'b']"),
        ("", "run.yaml is empty"),
        ("engine:\n  a: [1\n", "run.yaml:3: no valid YAML"),
        ("engine:\n\tblock_size: 8\n", "run.yaml:2: no valid YAML"),
        ("engine:\n  ? [1, 2]\n  : 3\n", "run.yaml:2: no valid YAML: found unhashable key"),
        ("engine:\n  5: 3\n", "run.yaml:2: unknown setting '5'"),
        (
            "engine:\n  block_size: ${engine.none}\n",
            "run.yaml:2: engine.block_size: Interpolation key 'engine.none' not found",
        ),
        ("engine:\n  block_size: ???\n", "run.yaml:2: engine.block_size: Missing mandatory value"),
        (
            "engine:\n  block_size: 8\n  diffusion_block_size: 16\n",
            "run.yaml:2: block_size (8) and diffusion_block_size (16) disagree",
        ),
    ],
)
def test_a_fault_is_reported_with_file_and_line(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(tmp_path, text)
    assert found.startswith(fault)


def test_all_faults_of_all_files_are_reported_together(tmp_path: Path) -> None:
    first = write(tmp_path, "engine:\n  blok_size: 8\n  page_size: x\n", "a.yaml")
    second = write(tmp_path, "eval:\n  max_tokens: 1\n  max_tokens: 2\n", "b.yaml")
    with pytest.raises(ConfigError) as caught:
        load_yaml([first, second, tmp_path / "none.yaml"], ["engine.pagesize=4", "nonsense"], SECTIONS)
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        f"{tmp_path}/b.yaml:3:",
        f"{tmp_path}/none.yaml",
        f"{tmp_path}/a.yaml:2:",
        "--set",
        "--set",
        f"{tmp_path}/a.yaml:3:",
    ]


def test_a_missing_file_and_a_binary_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        load_yaml([tmp_path / "none.yaml", tmp_path / "b.yaml", tmp_path], [], SECTIONS)
    missing, binary, folder = caught.value.problems
    assert missing.startswith(f"{tmp_path}/none.yaml cannot be read: No such file")
    assert binary.startswith(f"{tmp_path}/b.yaml is no UTF-8 text")
    assert folder.startswith(f"{tmp_path} cannot be read: Is a directory")


def test_a_later_file_wins_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path, "engine:\n  block_size: 8\n  page_size: 8\n", "a.yaml")
    second = write(tmp_path, "engine:\n  page_size: 16\n", "b.yaml")
    layer = load_yaml([first, second], [], SECTIONS)
    assert layer.values["engine"] == {"block_size": 8, "page_size": 16}
    assert layer.origins["engine"] == {"block_size": f"yaml {first}:2", "page_size": f"yaml {second}:2"}


def test_an_override_wins_over_files_and_is_typed_like_yaml(tmp_path: Path) -> None:
    layer = load(
        tmp_path,
        "engine:\n  block_size: 8\n",
        "engine.block_size=16",
        "engine.model_path=/a=b",
        "engine.device_ids=[0, 1]",
        "engine.enforce_eager=true",
        "engine.tokenizer_path=null",
        "eval.temperature=1e-1",
    )
    assert layer.values["engine"] == {
        "block_size": 16,
        "model": "/a=b",
        "device_ids": (0, 1),
        "enforce_eager": True,
        "tokenizer_path": None,
    }
    assert layer.values["eval"] == {"temperature": 0.1}
    assert layer.origins["engine"]["block_size"] == "--set engine.block_size=16"


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("engine.block_size", "--set engine.block_size: write SECTION.NAME=VALUE"),
        ("block_size=8", "--set block_size=8: write SECTION.NAME=VALUE"),
        ("engin.block_size=8", "--set engin.block_size=8: unknown section 'engin'"),
        (
            "engine.blok_size=8",
            "--set engine.blok_size=8: unknown setting 'blok_size'; did you mean 'block_size'?",
        ),
        ("engine.block_size=x", "--set engine.block_size=x: block_size must be a whole number, got 'x'"),
        ("engine.block_size=[1", "--set engine.block_size=[1: cannot be read as a value: '[1'"),
    ],
)
def test_a_wrong_override_is_reported_as_it_was_written(tmp_path: Path, override: str, fault: str) -> None:
    (found,) = faults(tmp_path, "engine:\n  page_size: 8\n", override)
    assert found.startswith(fault)


def test_values_may_refer_to_other_values(tmp_path: Path) -> None:
    layer = load(
        tmp_path, "engine:\n  block_size: 8\n  page_size: ${engine.block_size}\n", "engine.block_size=16"
    )
    assert layer.values["engine"] == {"block_size": 16, "page_size": 16}


def test_mappings_merge_key_by_key_and_overrides_reach_inside(tmp_path: Path) -> None:
    text = "engine:\n  profiler_config:\n    run_id: a\n  decoding_thresholds:\n    accept_threshold: 0.5\n"
    layer = load(
        tmp_path,
        text,
        "engine.profiler_config.schedule.active=3",
        "engine.decoding_thresholds.edit_threshold=0.25",
    )
    assert layer.values["engine"] == {
        "profiler_config": {"run_id": "a", "schedule": {"active": 3}},
        "accept_threshold": 0.5,
        "edit_threshold": 0.25,
    }


NESTED = "engine:\n  decoding_thresholds:\n    semi_complete_threshold: 0.8\n    accept_threshold: 0.9\n"


def test_a_nested_threshold_comes_with_the_line_of_its_own_key(tmp_path: Path) -> None:
    layer = load(tmp_path, NESTED, "engine.decoding_thresholds.edit_threshold=0.25")
    assert layer.origins["engine"] == {
        "semi_complete_threshold": f"yaml {tmp_path}/run.yaml:3",
        "accept_threshold": f"yaml {tmp_path}/run.yaml:4",
        "edit_threshold": "--set engine.decoding_thresholds.edit_threshold=0.25",
    }


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("accept_threshold: 1.5", "run.yaml:4: accept_threshold must be at least 0 and at most 1, got 1.5"),
        ("accept_threshold: x", "run.yaml:4: accept_threshold must be a finite number, got 'x'"),
        (
            "accept_treshold: 0.5",
            "run.yaml:4: decoding_thresholds: unknown setting 'accept_treshold'; did you mean 'accept_thr",
        ),
    ],
)
def test_a_faulty_nested_threshold_is_reported_with_the_line_of_its_own_key(
    tmp_path: Path, line: str, fault: str
) -> None:
    text = f"engine:\n  decoding_thresholds:\n    semi_complete_threshold: 0.8\n    {line}\n"
    (found,) = faults(tmp_path, text)
    assert found.startswith(fault)


def test_a_flat_and_a_nested_threshold_of_one_file_must_not_disagree(tmp_path: Path) -> None:
    assert faults(tmp_path, f"{NESTED}  accept_threshold: 0.5\n") == [
        "run.yaml:5: accept_threshold (0.5) and decoding_thresholds.accept_threshold (0.9) disagree; "
        "keep accept_threshold"
    ]
    assert load(tmp_path, f"{NESTED}  accept_threshold: 0.9\n").values["engine"] == {
        "semi_complete_threshold": 0.8,
        "accept_threshold": 0.9,
    }


@pytest.mark.parametrize(
    ("texts", "overrides", "value", "origin"),
    [
        ([NESTED], ["engine.accept_threshold=0.5"], 0.5, "--set engine.accept_threshold=0.5"),
        (
            ["engine:\n  accept_threshold: 0.5\n"],
            ["engine.decoding_thresholds.accept_threshold=0.9"],
            0.9,
            "--set engine.decoding_thresholds.accept_threshold=0.9",
        ),
        ([NESTED, "engine:\n  accept_threshold: 0.5\n"], [], 0.5, "yaml 1.yaml:2"),
        (["engine:\n  accept_threshold: 0.5\n", NESTED], [], 0.9, "yaml 1.yaml:4"),
    ],
)
def test_the_later_of_two_sources_decides_a_threshold_in_either_form(
    tmp_path: Path, texts: list[str], overrides: list[str], value: float, origin: str
) -> None:
    paths = [write(tmp_path, text, f"{number}.yaml") for number, text in enumerate(texts)]
    layer = load_yaml(paths, overrides, SECTIONS)
    assert layer.values["engine"]["accept_threshold"] == value
    assert layer.origins["engine"]["accept_threshold"].replace(f"{tmp_path}/", "") == origin


def test_a_flag_wins_over_a_nested_threshold_of_a_file(tmp_path: Path) -> None:
    merged = merge(
        load(tmp_path, NESTED), layer_of("engine", {"accept_threshold": 0.5}, "flag --accept-threshold")
    )
    assert merged.values["engine"]["accept_threshold"] == 0.5
    assert "decoding_thresholds" not in merged.values["engine"]


def test_values_may_refer_to_a_nested_threshold(tmp_path: Path) -> None:
    text = f"{NESTED}  add_block_threshold: ${{engine.decoding_thresholds.accept_threshold}}\n"
    assert load(tmp_path, text).values["engine"]["add_block_threshold"] == 0.9


def test_old_names_work_with_one_deprecation_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "engine:\n  diffusion_block_size: 8\n  decoding_strategy: block_diffusion\n"
    layer = load(tmp_path, text, "engine.max_num_seqs=4")
    assert layer.values["engine"] == {"block_size": 8, "decoding_strategy": "multi_bd", "max_num_reqs": 4}
    assert layer.origins["engine"]["block_size"] == f"yaml {tmp_path}/run.yaml:2"
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [
        "diffusion_block_size is deprecated; write block_size",
        "decoding_strategy='block_diffusion' is deprecated; write 'multi_bd'",
        "max_num_seqs is deprecated; write max_num_reqs",
    ]


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("1E+2", 100.0), ("0.5", 0.5), ("3", 3.0)])
def test_numbers_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    assert load(tmp_path, f"eval:\n  temperature: {text}\n").values["eval"]["temperature"] == value


def test_a_date_is_text(tmp_path: Path) -> None:
    assert load(tmp_path, "eval:\n  dataset_name: 2024-13-45\n").values["eval"] == {
        "dataset_name": "2024-13-45"
    }


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = "engine: &base\n  block_size: 8\n"
    assert load(tmp_path, text).values == {"engine": {"block_size": 8}}


def test_a_later_layer_wins_and_brings_its_origin() -> None:
    task = layer_of("eval", {"max_tokens": 1, "temperature": 0.5}, "task gsm8k")
    files = layer_of("eval", {"max_tokens": 2}, "yaml a.yaml:1")
    flags = layer_of("engine", {"block_size": 8}, "flag --block-size")
    merged = merge(task, files, flags)
    assert merged.values == {"eval": {"max_tokens": 2, "temperature": 0.5}, "engine": {"block_size": 8}}
    assert merged.origins["eval"] == {"max_tokens": "yaml a.yaml:1", "temperature": "task gsm8k"}
    assert task.values["eval"]["max_tokens"] == 1


def test_a_caller_may_go_on_with_the_settings_that_are_not_faulty(tmp_path: Path) -> None:
    path = write(tmp_path, "engine:\n  block_size: x\n  page_size: 8\n  pages: 3\n")
    layer, found = read_layer([path], [], SECTIONS)
    assert layer.values == {"engine": {"page_size": 8}}
    assert layer.origins == {"engine": {"page_size": f"yaml {path}:3"}}
    assert [fault.partition(": ")[0] for fault in found] == [f"{path}:4", f"{path}:2"]
