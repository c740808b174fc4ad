"""Families, strategies and rules on drafts: also the combinations that this version refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.config import ENGINE_SETTINGS
from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS
from diffulex.settings.resolve import resolve_settings
from diffulex.settings.rules import RULES
from tests.support.configs import NO_HARDWARE, make_draft

if TYPE_CHECKING:
    from diffulex.settings.draft import Draft, Hardware


def resolved(hardware: Hardware = NO_HARDWARE, **given: Any) -> Draft:
    draft = make_draft(hardware, **{"model": "somewhere", **given})
    resolve_settings(draft, ENGINE_SETTINGS)
    draft.problems = [one for one in draft.problems if "not available yet" not in one.text]
    return draft


def problems(**given: Any) -> list[str]:
    return [text for _, text in resolved(**given).problems]


class TestStrategies:
    @pytest.mark.parametrize(
        ("model_name", "strategy"),
        [
            ("dream", "d2f"),
            ("diffucoder", "d2f"),
            ("llada", "d2f"),
            ("diffusion_gemma", "diffusion_gemma"),
            ("fast_dllm_v2", "fast_dllm_v2"),
            ("llada2_mini_dmax", "dmax"),
            ("sdar", "multi_bd"),
            ("sdar_moe", "multi_bd"),
            ("llada2", "multi_bd"),
            ("llada2_moe", "multi_bd"),
            ("llada2_mini", "multi_bd"),
            ("llada2dot1_mini", "multi_bd"),
            ("dream_reasoner", "multi_bd"),
            ("stable_diffcoder", "multi_bd"),
        ],
    )
    def test_an_unset_strategy_is_the_familys_own_and_works(self, model_name: str, strategy: str) -> None:
        draft = resolved(model_name=model_name)
        assert draft.values["decoding_strategy"] == strategy
        assert not draft.problems
        assert "decoding_strategy" not in draft.explicit

    @pytest.mark.parametrize(
        "model_name", [name for name in MODEL_DEFAULTS if name not in ("llada2_mini_dmax", "diffusion_gemma")]
    )
    def test_multi_bd_runs_with_every_family_that_fills_masks(self, model_name: str) -> None:
        assert not problems(model_name=model_name, decoding_strategy="multi_bd")

    @pytest.mark.parametrize(
        ("given", "names"),
        [
            (
                {"model_name": "llada", "decoding_strategy": "dmax", "sampling_mode": "edit"},
                ("dmax", "llada"),
            ),
            ({"model_name": "dream", "sampling_mode": "edit"}, ("edit", "dream")),
            (
                {"model_name": "llada2_mini", "decoding_strategy": "dmax", "sampling_mode": "naive"},
                ("naive", "dmax"),
            ),
            ({"model_name": "llada2_mini", "decoding_strategy": "dmax"}, ("naive", "dmax")),
            ({"model_name": "llada2dot1_mini", "sampling_mode": "naive"}, ("naive", "llada2dot1_mini")),
            (
                {"model_name": "llada2_mini_dmax", "decoding_strategy": "multi_bd"},
                ("multi_bd", "llada2_mini_dmax"),
            ),
            ({"model_name": "sdar", "decoding_strategy": "d2f"}, ("d2f", "sdar")),
            (
                {"model_name": "diffusion_gemma", "decoding_strategy": "multi_bd"},
                ("multi_bd", "diffusion_gemma"),
            ),
        ],
    )
    def test_b31_combinations_that_cannot_run_name_both_settings(
        self, given: dict[str, str], names: tuple[str, str]
    ) -> None:
        found = problems(**given)
        assert found
        for name in names:
            assert repr(name) in found[0]
        assert "does not run with" in found[0]
        assert "; use " in found[0]

    @pytest.mark.parametrize(
        ("given", "forced"),
        [
            ({"model_name": "dream"}, {"multi_block_prefix_full": True, "enable_prefix_caching": False}),
            ({"model_name": "sdar"}, {"multi_block_prefix_full": False, "enable_prefix_caching": True}),
            ({"model_name": "llada2_mini_dmax"}, {"multi_block_prefix_full": False, "sampling_mode": "edit"}),
            (
                {"model_name": "diffusion_gemma", "block_size": 16},
                {"multi_block_prefix_full": False, "block_size": 256, "page_size": 256, "buffer_size": 1},
            ),
            (
                {"model_name": "fast_dllm_v2", "enable_prefix_caching": False},
                {"multi_block_prefix_full": False, "enable_prefix_caching": True},
            ),
        ],
    )
    def test_a_strategy_forces_its_settings(self, given: dict[str, Any], forced: dict[str, Any]) -> None:
        draft = resolved(**given)
        assert {name: draft.values[name] for name in forced} == forced
        assert not draft.problems
        overridden = [name for name in forced if name in given]
        assert len(draft.notes) == len(overridden)
        for name in overridden:
            assert name in draft.notes[0][1]
            assert draft.origins[name].startswith("forced by strategy")

    def test_the_dual_cache_needs_more_than_one_block(self) -> None:
        assert problems(model_name="fast_dllm_v2", buffer_size=1)[0].startswith("buffer_size must be above 1")

    def test_every_forced_and_default_setting_exists_and_every_family_runs_its_default(self) -> None:
        for row in STRATEGY_DEFAULTS.values():
            assert set(row.forces) <= set(ENGINE_SETTINGS)
        for family in MODEL_DEFAULTS.values():
            assert family.default_strategy in family.strategies
            assert set(family.strategies) <= set(STRATEGY_DEFAULTS)
            assert set(family.settings) <= set(ENGINE_SETTINGS)

    def test_shift_and_force_rules_are_those_of_the_families(self) -> None:
        shifted = {name for name, family in MODEL_DEFAULTS.items() if family.shift_logits}
        assert shifted == {"dream", "diffucoder", "fast_dllm_v2"}
        grounded = {name for name, family in MODEL_DEFAULTS.items() if family.force_rule == "grounded"}
        assert grounded == {"llada", "sdar", "sdar_moe"}
        always = {name for name, family in MODEL_DEFAULTS.items() if family.force_rule == "always"}
        assert always == {"stable_diffcoder"}


class TestThresholds:
    NAMES = ("accept_threshold", "decoding_thresholds")

    def folded(self, flat: str, nested: str) -> Draft:
        given: dict[str, Any] = {"accept_threshold": 0.5, "decoding_thresholds": {"accept_threshold": 0.9}}
        draft = make_draft(model="somewhere", model_name="sdar", **given)
        draft.origins |= dict(zip(self.NAMES, (flat, nested), strict=True))
        resolve_settings(draft, ENGINE_SETTINGS)
        return draft

    @pytest.mark.parametrize(
        ("flat", "nested"),
        [
            ("keyword argument", "keyword argument"),
            ("yaml a.yaml:3", "yaml a.yaml:4"),
            ("task gsm8k", "task gsm8k"),
        ],
    )
    def test_two_values_of_one_threshold_from_one_kind_of_source_are_refused(
        self, flat: str, nested: str
    ) -> None:
        (problem,) = self.folded(flat, nested).problems
        assert problem == (
            "accept_threshold",
            "accept_threshold (0.5) and decoding_thresholds.accept_threshold (0.9) disagree; "
            "keep accept_threshold",
        )

    @pytest.mark.parametrize(
        ("flat", "nested", "value"),
        [
            ("flag --accept-threshold", "yaml a.yaml:4", 0.5),
            ("--set engine.accept_threshold=0.5", "yaml a.yaml:4", 0.5),
            ("yaml a.yaml:3", "--set engine.decoding_thresholds.accept_threshold=0.9", 0.9),
            ("task gsm8k", "yaml a.yaml:4", 0.9),
        ],
    )
    def test_of_two_values_the_one_of_higher_precedence_wins(
        self, flat: str, nested: str, value: float
    ) -> None:
        draft = self.folded(flat, nested)
        assert not draft.problems
        assert draft.values["accept_threshold"] == value
        assert draft.origins["accept_threshold"] == (flat if value == 0.5 else nested)


class TestRules:
    @pytest.mark.parametrize(
        ("given", "start"),
        [
            ({"model": ""}, "model must be the folder of a checkpoint"),
            ({"block_size": 16, "page_size": 8}, "block_size (16) must not exceed page_size (8)"),
            ({"block_size": 256, "page_size": 256}, "block_size must be one of 4, 8, 16, 32 unless"),
            ({"page_size": 256}, "page_size must be one of 4, 8, 16, 32 unless"),
            ({"num_pages": 0}, "num_pages must be -1 or at least 1, got 0"),
            (
                {"max_num_batched_tokens": 127, "max_model_len": 127, "buffer_size": 4},
                "max_num_batched_tokens (127) must hold the open blocks of one request",
            ),
            ({"use_lora": True}, "lora_path must be the folder of the adapter"),
            ({"device_ids": (1, 1)}, "device_ids must name each device once, got [1, 1]"),
        ],
    )
    def test_a_broken_rule_across_settings_is_reported(self, given: dict[str, Any], start: str) -> None:
        assert any(text.startswith(start) for text in problems(model_name="sdar", **given))

    def test_a_canvas_schedule_must_fall(self) -> None:
        (text,) = problems(model_name="diffusion_gemma", diffusion_gemma_t_min=1.0)
        assert text.startswith("diffusion_gemma_t_min (1.0) must be below")

    def test_a_short_sequence_needs_no_more_tokens_than_it_has(self) -> None:
        assert not problems(model_name="sdar", max_model_len=64, max_num_batched_tokens=64)

    def test_rules_about_refused_values_stay_silent(self) -> None:
        assert problems(model_name="sdar", block_size="32", page_size=8) == [
            "block_size must be a whole number, got '32'"
        ]

    def test_every_rule_names_settings(self) -> None:
        for rule in RULES:
            assert set(rule.names) <= set(ENGINE_SETTINGS)
