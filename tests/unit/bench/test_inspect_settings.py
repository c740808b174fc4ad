"""The settings an inspection resolves, and the command line it hands out."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest

from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.settings.spec import ConfigError
from diffulex.utils.checkpoint import read_checkpoint
from diffulex_bench import main as main_module
from diffulex_bench.inspection.asked import resolve_asked, runs_now
from tests.support.families import write_family
from tests.support.inspections import ROOMY, inspect, set_places

if TYPE_CHECKING:
    from pathlib import Path

NAMES = tuple(MODEL_DEFAULTS)


@pytest.fixture(autouse=True)
def _roomy_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_places(monkeypatch, ROOMY)


class TestSettings:
    def test_strategy_is_the_first_that_runs_and_the_block_the_trained_one(self, tmp_path: Path) -> None:
        found = inspect(write_family(tmp_path / "model", "sdar", {"block_size": 16}))
        assert (found.asked.strategy, found.asked.block_size) == ("multi_bd", 16)
        larger = inspect(write_family(tmp_path / "b64", "sdar", {"block_size": 64}))
        assert larger.asked.block_size == 32
        assert any("trained with blocks of 64" in note for note in larger.notes)

    def test_fast_dllm_v2_opens_its_trained_block_as_several(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "fast_dllm_v2")
        asked = inspect(folder, decoding_strategy="fast_dllm_v2").asked
        assert (asked.block_size, asked.buffer_size) == (8, 4)

    def test_length_above_the_checkpoints_is_lowered_and_a_long_one_raises_the_budget(
        self, tmp_path: Path
    ) -> None:
        folder = write_family(tmp_path / "model", "llada")
        found = inspect(folder, max_model_len=9999)
        assert found.asked.max_model_len == 4096
        assert any("lowered to 4096" in note for note in found.notes)
        sdar = inspect(write_family(tmp_path / "sdar", "sdar", {"block_size": 16}), max_model_len=8192)
        assert "--max-model-len 8192" in str(sdar.command)
        assert "--max-num-batched-tokens 8192" in str(sdar.command)

    def test_broken_rules_are_errors_as_in_a_run(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        with pytest.raises(ConfigError, match="must not exceed page_size"):
            inspect(folder, block_size=32, page_size=8)
        with pytest.raises(ConfigError, match="does not run with model_name='sdar'"):
            inspect(folder, decoding_strategy="d2f")

    def test_edit_sampling_is_written_where_the_strategy_needs_it(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "llada2_mini")
        asked = resolve_asked(
            str(folder), ("llada2_mini",), read_checkpoint(folder), {"decoding_strategy": "dmax"}, {}
        )
        assert asked.flags["sampling_mode"] == "edit"


class TestCommand:
    @pytest.mark.parametrize("name", [name for name in NAMES if runs_now(name, "multi_bd")])
    @pytest.mark.parametrize("written", [{}, {"max_model_len": 512, "page_size": 32, "max_num_reqs": 3}])
    def test_command_gives_the_settings_it_was_made_for(
        self, name: str, written: dict[str, Any], tmp_path: Path
    ) -> None:
        folder = write_family(tmp_path / "a model", name)
        found = inspect(folder, model_name=name, decoding_strategy="multi_bd", **written)
        words = shlex.split(str(found.command))
        assert words[0] == "diffulex-bench"
        arguments = main_module._parser("x", "x").parse_args(words[1:])
        config = main_module._load(arguments).engine_config
        assert config.model == str(folder)
        assert (config.model_name, config.decoding_strategy) == (name, "multi_bd")
        for setting in ("block_size", "buffer_size", "page_size", "max_model_len", "max_num_reqs"):
            assert getattr(config, setting) == getattr(found.asked, setting)

    def test_published_configuration_is_used_where_family_strategy_and_block_are_its_own(
        self, tmp_path: Path
    ) -> None:
        commands = {
            block: str(inspect(write_family(tmp_path / f"b{block}", "sdar", {"block_size": block})).command)
            for block in (4, 16, 32)
        }
        assert "--config sdar_multi_bd_b4 " in commands[4]
        assert "--config sdar_multi_bd_b32 " in commands[32]
        assert "--config" not in commands[16]
        assert "--block-size 16" in commands[16]
        assert "--apply-chat-template" in commands[16]

    def test_adapter_of_a_published_pair_is_left_to_be_filled_in(self, tmp_path: Path) -> None:
        found = inspect(write_family(tmp_path / "model", "llada"), decoding_strategy="d2f")
        assert "--config llada_d2f " in str(found.command)
        assert "--lora-path /path/to/adapter" in str(found.command)

    def test_what_does_not_run_yet_is_said(self, tmp_path: Path) -> None:
        found = inspect(write_family(tmp_path / "model", "llada2_mini_dmax"))
        for option in found.options:
            assert option.runs_now == runs_now(option.model_name, option.strategy)
        told = any("does not run" in note for note in found.notes)
        assert told != runs_now(found.asked.model_name, found.asked.strategy)
