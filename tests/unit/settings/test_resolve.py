"""Families, strategies, effects and features on drafts: also the combinations that this version refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.config import DEFAULTS, ENGINE_SETTINGS
from diffulex.settings.availability import FEATURES, Feature, apply_features, choose_device
from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS
from diffulex.settings.effects import EFFECTS, check_effects
from diffulex.settings.resolve import resolve_settings
from diffulex.settings.rules import RULES
from tests.support.configs import NO_HARDWARE, TWO_GPUS, make_draft

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


# A value other than the default for every setting of the effects table, and what makes it effective.
IN_VAIN: dict[str, object] = {
    "max_post_edit_steps": 3,
    "penalty_lambda": 0.5,
    "edit_threshold": 0.5,
    "token_stability_threshold": 0.5,
    "remask_threshold": 0.5,
    "enable_remasking": True,
    "token_merge_mode": "iter_smooth_topk",
    "token_merge_top_k": 2,
    "token_merge_renormalize": False,
    "token_merge_weight": 0.5,
    "dmax_sampler_fast_path": False,
    "dmax_force_prefill_active": True,
    "d2f_block_origin": "grid",
    "d2f_reuse_prompt": False,
    "fdv2_use_block_cache": False,
    "diffusion_gemma_max_denoising_steps": 3,
    "diffusion_gemma_stability_threshold": 1,
    "diffusion_gemma_confidence_threshold": 0.5,
    "diffusion_gemma_t_min": 0.5,
    "diffusion_gemma_t_max": 0.5,
    "diffusion_gemma_entropy_bound": 0.5,
    "auto_max_nfe_warmup_steps": 3,
    "auto_max_nfe_tpf_floor": 2.0,
    "lora_path": "x",
    "pre_merge_lora": True,
    "moe_gemm_impl": "vllm",
    "moe_dispatcher_backend": "naive",
    "expert_parallel_size": 2,
    "deepep_mode": "normal",
    "deepep_num_max_dispatch_tokens_per_rank": 1,
    "master_addr": "elsewhere",
    "master_port": 1234,
    "distributed_timeout_seconds": 1,
    "shm_name": "x",
    "device_start": 1,
    "device_ids": (0,),
    "k_cache_hdim_split_factor_x": 4,
    "torch_compile_mode": "default",
    "prefill_cudagraph_max_len": 1,
}


# A configuration under which none of them has an effect.
PLAIN: dict[str, object] = {
    "model_name": "sdar",
    "decoding_strategy": "multi_bd",
    "device": "cpu",
    "enable_torch_compile": False,
    "tensor_parallel_size": 1,
}


class TestEffects:
    @pytest.mark.parametrize("name", IN_VAIN)
    def test_a_value_that_nothing_reads_is_refused_by_name(self, name: str) -> None:
        draft = make_draft(**PLAIN, **{name: IN_VAIN[name]})
        check_effects(draft)
        assert [problem.name for problem in draft.problems] == [name]
        assert draft.problems[0].text.startswith(f"{name}={IN_VAIN[name]!r} has no effect without ")

    @pytest.mark.parametrize("name", IN_VAIN)
    def test_the_default_may_be_written_anywhere(self, name: str) -> None:
        draft = make_draft(**PLAIN, **{name: DEFAULTS[name]})
        check_effects(draft)
        assert not draft.problems

    @pytest.mark.parametrize(
        "given",
        [
            {
                "model_name": "llada2",
                "sampling_mode": "edit",
                "max_post_edit_steps": 3,
                "edit_threshold": 0.5,
            },
            {"sampling_mode": "edit", "enable_remasking": True, "remask_threshold": 0.5},
            {"decoding_strategy": "dmax", "sampling_mode": "edit", "token_merge_top_k": 2},
            {"decoding_strategy": "d2f", "d2f_block_origin": "grid"},
            {"decoding_strategy": "fast_dllm_v2", "fdv2_use_block_cache": False},
            {"model_name": "diffusion_gemma", "diffusion_gemma_t_max": 0.5},
            {"auto_max_nfe": True, "auto_max_nfe_warmup_steps": 3},
            {"use_lora": True, "lora_path": "x", "pre_merge_lora": True},
            {
                "model_name": "sdar_moe",
                "moe_gemm_impl": "vllm",
                "moe_dispatcher_backend": "deepep",
                "deepep_mode": "normal",
            },
            {"tensor_parallel_size": 2, "master_port": 99, "device": "cuda", "device_ids": (0, 1)},
            {"tensor_parallel_size": 1, "device": "cuda", "device_start": 1},
            {"enable_torch_compile": True, "torch_compile_mode": "default"},
            {"decoding_strategy": "of_somebody_else", "token_merge_top_k": 2, "max_post_edit_steps": 3},
        ],
    )
    def test_a_value_that_is_read_may_be_written(self, given: dict[str, Any]) -> None:
        draft = make_draft(**{"model_name": "llada2", "decoding_strategy": "multi_bd", **given})
        check_effects(draft)
        assert not draft.problems

    def test_settings_of_a_sweep_are_noted_and_not_refused(self) -> None:
        draft = make_draft(
            model_name="sdar", buffer_size=1, add_block_threshold=0.5, semi_complete_threshold=0.5
        )
        check_effects(draft)
        assert not draft.problems
        assert [text.split("=")[0] for _, text in draft.notes] == [
            "add_block_threshold",
            "semi_complete_threshold",
        ]

    def test_the_table_names_settings_and_this_test_covers_them(self) -> None:
        refused = {name for effect in EFFECTS if effect.refuse for name in effect.names}
        assert refused <= set(ENGINE_SETTINGS)
        assert refused - {"distributed_backend"} == set(IN_VAIN)


class TestFeatures:
    PARALLEL = (Feature("tensor_parallel_size", (1,), ready=True, need="devices"),)
    TRITON = (Feature("attn_impl", ("naive",), ready=True, need="cuda"),)
    VLLM = (Feature("enable_vllm_layers", (False,), ready=True, need="vllm"),)

    def applied(self, features: tuple[Feature, ...], hardware: Hardware, **given: Any) -> Draft:
        draft = make_draft(hardware, **given)
        choose_device(draft)
        apply_features(draft, features)
        return draft

    def test_a_wish_that_can_be_had_stays(self) -> None:
        features = self.PARALLEL + self.TRITON + self.VLLM
        draft = self.applied(features, TWO_GPUS)
        wishes = ("tensor_parallel_size", "attn_impl", "enable_vllm_layers")
        assert [draft.values[name] for name in wishes] == [2, "triton_grouped", True]
        assert not draft.notes
        assert not draft.problems

    def test_a_wish_for_two_devices_becomes_one_on_a_machine_with_one(self) -> None:
        draft = self.applied(self.PARALLEL, TWO_GPUS._replace(device_count=1))
        assert draft.values["tensor_parallel_size"] == 1
        assert draft.notes[0][1] == (
            "defaults lowered "
            "(needs as many CUDA devices and this machine has 1: tensor_parallel_size 2 -> 1)"
        )

    def test_a_demand_beyond_the_machine_is_refused(self) -> None:
        draft = self.applied(self.PARALLEL, TWO_GPUS, tensor_parallel_size=4)
        assert [text for _, text in draft.problems] == [
            "tensor_parallel_size=4 needs as many CUDA devices and this machine has 2; "
            "use tensor_parallel_size=1 or leave it unset"
        ]

    def test_a_demand_that_can_be_had_stays(self) -> None:
        draft = self.applied(self.TRITON, TWO_GPUS, attn_impl="triton")
        assert draft.values["attn_impl"] == "triton"
        assert not draft.problems

    def test_the_cpu_written_as_device_lowers_wishes_and_says_so(self) -> None:
        draft = self.applied(self.TRITON, TWO_GPUS, device="cpu")
        assert draft.values["attn_impl"] == "naive"
        assert "device is 'cpu'" in draft.notes[0][1]

    def test_what_a_model_asks_for_is_a_demand(self) -> None:
        draft = make_draft(TWO_GPUS)
        draft.set("sampling_mode", "edit", "model default (llada2dot1_mini)")
        apply_features(draft, (Feature("sampling_mode", ("naive",)),))
        assert draft.problems[0].text == (
            "sampling_mode='edit' is not available yet in this version; use sampling_mode='naive'"
        )

    def test_plain_values_are_values_of_their_settings(self) -> None:
        for feature in FEATURES:
            choices = ENGINE_SETTINGS[feature.name].setting.choices
            assert not choices or set(feature.plain) <= set(choices)
