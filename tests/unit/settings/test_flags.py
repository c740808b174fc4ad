from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from diffulex.config import ENGINE_SETTINGS
from diffulex.settings.flags import FlagParser, add_flags, flag_layer
from diffulex.settings.layers import Layer, layer_of, merge
from diffulex.settings.sections import ENGINE_SECTIONS
from diffulex.settings.spec import setting


@dataclass(frozen=True)
class Evaluation:
    dataset_limit: int | None = setting(None, help="Share of 100 % of the set.", low=1)
    words: tuple[str, ...] = setting((), help="h")


def parser() -> FlagParser:
    made = FlagParser(prog="prog")
    made.add_argument("--other")
    add_flags(made, ENGINE_SECTIONS, "engine")
    add_flags(made, (Evaluation,), "eval")
    return made


def layer(*arguments: str) -> Layer:
    return flag_layer(parser().parse_args(arguments))


def error(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_absent_flags_write_nothing() -> None:
    assert layer("--other", "x") == Layer()


def test_flags_write_typed_values_with_their_origin() -> None:
    made = layer(
        "--model-path", "m", "--block-size", "16", "--accept-threshold", "1", "--device-ids", "0,2",
        "--profiler-config", "{activities: [cpu]}", "--dataset-limit", "3", "--words", "a,b",
    )  # fmt: skip
    assert made.values == {
        "engine": {
            "model": "m",
            "block_size": 16,
            "accept_threshold": 1.0,
            "device_ids": (0, 2),
            "profiler_config": {"activities": ["cpu"]},
        },
        "eval": {"dataset_limit": 3, "words": ("a", "b")},
    }
    assert isinstance(made.values["engine"]["accept_threshold"], float)
    assert made.origins["engine"]["block_size"] == "flag --block-size"


@pytest.mark.parametrize(
    ("flag", "value"), [("--enable-prefix-caching", True), ("--no-enable-prefix-caching", False)]
)
def test_booleans_have_two_flags(flag: str, value: bool) -> None:
    assert layer(flag).values == {"engine": {"enable_prefix_caching": value}}


def test_nothing_can_be_written_where_nothing_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert layer("--dataset-limit", "null", "--tokenizer-path", "none").values == {
        "eval": {"dataset_limit": None},
        "engine": {"tokenizer_path": None},
    }
    assert "a whole number expected, got 'null'" in error(capsys, ["--block-size", "null"])


def test_every_setting_has_a_flag_except_the_threshold_object() -> None:
    options = parser()._option_string_actions
    missing = {name for name in ENGINE_SETTINGS if "--" + name.replace("_", "-") not in options}
    assert missing == {"decoding_thresholds"}


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    message = error(capsys, ["--blok-size", "8"])
    assert (
        message
        == "prog: error: unknown flag --blok-size; did you mean '--block-size'?; --help lists all flags\n"
    )


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --block-siz;" in error(capsys, ["--block-siz=8"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--block-size", "x"], "a whole number expected, got 'x'"),
        (["--max-num-reqs", "1.5"], "a whole number expected, got '1.5'"),
        (["--accept-threshold", "true"], "a finite number expected, got 'true'"),
        (["--device-ids", "a"], "whole numbers with commas expected, got 'a'"),
        (["--profiler-config", "[1"], "cannot be read as a value"),
        (["--profiler-config", "5"], "a mapping of names to values expected, got '5'"),
        (["--block-size"], "expected one argument"),
    ],
)
def test_a_value_of_the_wrong_type_ends_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    message = error(capsys, arguments)
    assert text in message
    assert arguments[0] in message


def test_text_stays_text() -> None:
    assert (
        layer("--master-addr", "10", "--torch-compile-mode", "default").values["engine"]["master_addr"]
        == "10"
    )


def test_old_flags_work_with_one_deprecation_line(caplog: pytest.LogCaptureFixture) -> None:
    made = layer("--max-num-seqs", "4", "--diffusion-block-size", "8", "--decoding-strategy", "fast_dllm")
    assert made.values["engine"] == {"max_num_reqs": 4, "block_size": 8, "decoding_strategy": "multi_bd"}
    assert made.origins["engine"]["max_num_reqs"] == "flag --max-num-seqs"
    assert sorted(record.getMessage() for record in caplog.records) == [
        "--diffusion-block-size is deprecated; write --block-size",
        "--max-num-seqs is deprecated; write --max-num-reqs",
        "decoding_strategy='fast_dllm' is deprecated; write 'multi_bd'",
    ]


def test_the_present_flag_wins_over_its_old_name() -> None:
    for arguments in (
        ("--max-num-seqs", "4", "--max-num-reqs", "5"),
        ("--max-num-reqs", "5", "--max-num-seqs", "4"),
    ):
        made = layer(*arguments)
        assert made.values["engine"] == {"max_num_reqs": 5}
        assert made.origins["engine"] == {"max_num_reqs": "flag --max-num-reqs"}


def test_help_lists_default_choices_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--block-size {4,8,16,32,256} Tokens in one diffusion block; unset, " in text
    assert "or its family says so. Default 32." in text
    assert "Default 0.9; above 0 and at most 1." in text
    assert "--model-path TEXT, --model TEXT Local folder of the checkpoint. Required." in text
    assert "Share of 100 % of the set. Default unset; at least 1." in text
    assert "--max-num-seqs" not in text
    assert "engine settings:" in text


def test_flag_wins_over_yaml_and_yaml_over_task() -> None:
    task = layer_of("eval", {"dataset_limit": 1}, "task")
    files = merge(
        layer_of("eval", {"dataset_limit": 2}, "yaml"), layer_of("engine", {"block_size": 4}, "yaml")
    )
    made = merge(task, files, layer("--block-size", "8"))
    assert made.values == {"eval": {"dataset_limit": 2}, "engine": {"block_size": 8}}
