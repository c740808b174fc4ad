"""Every bundled configuration: known keys, allowed values, no rule broken, a source behind each value."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest

from diffulex.config import DEFAULTS, ENGINE_SETTINGS
from diffulex.settings.checkpoint_rules import apply_checkpoint
from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.settings.draft import CLASS_DEFAULT, Draft
from diffulex.settings.effects import check_effects
from diffulex.settings.resolve import resolve_settings
from diffulex.settings.sources import load_yaml
from diffulex.settings.spec import ConfigError
from diffulex_bench.config import BENCH_SECTIONS, BenchConfig
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.inspection.asked import runs_now
from diffulex_bench.main import main
from diffulex_bench.task_files import bundled_folder, find_config, scan_tasks
from tests.support.configs import TWO_GPUS
from tests.support.families import write_adapter, write_family

if TYPE_CHECKING:
    from pathlib import Path

FILES = sorted(bundled_folder("configs").glob("*.yaml"))
PUBLISHED = [file for file in FILES if not file.stem.startswith("tiny_")]
#: Choices of this project or places on a user's machine, which need no source.
UNSOURCED = {
    "model_path",
    "model_name",
    "decoding_strategy",
    "use_lora",
    "dataset_name",
    "tokenizer_path",
    "dataset_limit",
}

EXPECTED = {
    "dream_multi_bd", "dream_d2f", "diffucoder_d2f", "dream_reasoner_multi_bd", "stable_diffcoder_multi_bd",
    "llada_d2f", "llada_multi_bd", "sdar_multi_bd_b4", "sdar_multi_bd_b32", "sdar_moe_multi_bd",
    "fast_dllm_v2", "fast_dllm_v2_multi_bd", "llada2_mini_multi_bd", "llada2dot1_mini_edit_speed",
    "llada2dot1_mini_edit_quality", "llada2_mini_dmax", "diffusion_gemma", "tiny_multi_bd", "tiny_single_bd",
}  # fmt: skip


def by_name(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda file: file.stem)


def engine_of(file: Path, *overrides: str) -> dict[str, object]:
    return dict(load_yaml([file], overrides, BENCH_SECTIONS).values["engine"])


def resolved(file: Path, model: Path) -> Draft:
    """All rules that depend neither on this machine nor on what this version runs."""
    engine = engine_of(file, f"engine.model_path={model}")
    origins = {name: "yaml" if name in engine else CLASS_DEFAULT for name in ENGINE_SETTINGS}
    draft = Draft({**DEFAULTS, **engine}, set(engine), origins, DEFAULTS, lambda: TWO_GPUS)
    resolve_settings(draft, ENGINE_SETTINGS)
    apply_checkpoint(draft)
    check_effects(draft)
    return draft


def test_every_published_pair_has_a_configuration() -> None:
    assert {file.stem for file in FILES} == EXPECTED


@by_name(PUBLISHED)
def test_configuration_breaks_no_rule_and_nothing_in_it_is_overridden_or_in_vain(
    file: Path, tmp_path: Path
) -> None:
    draft = resolved(file, write_family(tmp_path / "model", str(engine_of(file)["model_name"])))
    assert draft.sentences() == []
    assert [text for level, text in draft.notes if level > logging.INFO] == []


@by_name(PUBLISHED)
def test_configuration_leaves_room_for_a_question_beside_the_longest_answer(
    file: Path, tmp_path: Path
) -> None:
    layer = load_yaml([file], [], BENCH_SECTIONS)
    evaluation = EvalSettings(**layer.values["eval"])
    draft = resolved(file, write_family(tmp_path / "model", str(layer.values["engine"]["model_name"])))
    assert draft.values["max_model_len"] - evaluation.max_tokens >= 512


@by_name(FILES)
def test_tasks_of_a_configuration_exist(file: Path) -> None:
    tasks, _ = scan_tasks(bundled_folder("tasks"))
    assert set(EvalSettings(**load_yaml([file], [], BENCH_SECTIONS).values["eval"]).task_names) <= set(tasks)


@by_name(PUBLISHED)
def test_every_value_has_its_source_beside_it_and_paths_are_placeholders(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    for line in lines:
        found = re.match(r"\s+(\w+):\s+(\S+)\s*(#.*)?$", line)
        if found and found[1] not in UNSOURCED:
            assert found[3], f"{found[1]} of {file.name} has no source"
        if found and found[1] in ("model_path", "lora_path"):
            assert found[2].startswith("/path/to/")


@by_name(PUBLISHED)
def test_configuration_runs_as_soon_as_the_table_of_availability_says_so(file: Path, tmp_path: Path) -> None:
    engine = engine_of(file)
    name, strategy = str(engine["model_name"]), str(engine["decoding_strategy"])
    model = write_family(tmp_path / "model", name)
    overrides = [f"engine.model_path={model}", "engine.device=cpu"]
    if engine.get("use_lora"):
        overrides.append(f"engine.lora_path={write_adapter(tmp_path / 'adapter')}")
        engine["lora_path"] = str(tmp_path / "adapter")
    if runs_now(name, strategy):
        config = BenchConfig.load([file], overrides).engine_config
        assert (config.model_name, config.decoding_strategy) == (name, strategy)
        assert {
            one: getattr(config, one) for one in engine if one not in ("model", "decoding_thresholds")
        } == {one: value for one, value in engine.items() if one not in ("model", "decoding_thresholds")}
    else:
        with pytest.raises(ConfigError, match="not available yet"):
            BenchConfig.load([file], overrides)


@by_name(PUBLISHED)
def test_placeholder_of_the_model_gives_the_normal_error(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--config", file.stem]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "/path/to/" in text


def test_strategies_of_the_configurations_are_those_of_their_families() -> None:
    for file in FILES:
        engine = engine_of(file)
        assert engine["decoding_strategy"] in MODEL_DEFAULTS[str(engine["model_name"])].strategies


def test_configurations_are_found_by_their_bare_names() -> None:
    assert all(find_config(file.stem) == file for file in FILES)
