"""Settings without effect and features of machine and version, on drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.config import DEFAULTS, ENGINE_SETTINGS
from diffulex.settings.availability import FEATURES, Feature, apply_features, choose_device
from diffulex.settings.effects import EFFECTS, check_effects
from tests.support.configs import TWO_GPUS, make_draft

if TYPE_CHECKING:
    from diffulex.settings.draft import Draft, Hardware


# A value other than the default for every setting of the effects table, and what makes it effective.
IN_VAIN: dict[str, object] = {
    "max_post_edit_steps": 3,
    "penalty_lambda": 0.5,
    "edit_threshold": 0.5,
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
    "skip_warmup": True,
    "enforce_eager": True,
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
        assert draft.problems[0].text.startswith(
            (
                f"{name}={IN_VAIN[name]!r} has no effect without ",
                f"{name}={IN_VAIN[name]!r} has no effect in this version, ",
            )
        )

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
            {"decoding_strategy": "of_somebody_else", "skip_warmup": True, "enforce_eager": True},
            {"buffer_size": 2, "token_stability_threshold": 0.5},
        ],
    )
    def test_a_value_that_is_read_may_be_written(self, given: dict[str, Any]) -> None:
        draft = make_draft(**{"model_name": "llada2", "decoding_strategy": "multi_bd", **given})
        check_effects(draft)
        assert not draft.problems

    def test_what_this_version_lacks_is_said_in_the_refusal(self) -> None:
        draft = make_draft(**PLAIN, skip_warmup=True, enforce_eager=True)
        check_effects(draft)
        assert [text for _, text in draft.problems] == [
            "skip_warmup=True has no effect in this version, which has no warm-up; leave skip_warmup unset",
            "enforce_eager=True has no effect in this version, which has no graphs and no compilation; "
            "leave enforce_eager unset",
        ]

    @pytest.mark.parametrize(
        ("buffer_size", "given"),
        [
            (
                1,
                {
                    "add_block_threshold": 0.5,
                    "semi_complete_threshold": 0.5,
                    "token_stability_threshold": 0.5,
                },
            ),
            (2, {"overlap_store": False}),
        ],
    )
    def test_settings_of_a_sweep_are_noted_and_not_refused(
        self, buffer_size: int, given: dict[str, Any]
    ) -> None:
        draft = make_draft(**PLAIN, buffer_size=buffer_size, **given)
        check_effects(draft)
        assert not draft.problems
        assert [text.split("=")[0] for _, text in draft.notes] == list(given)

    def test_the_help_of_exactly_the_settings_that_are_only_noted_says_so(self) -> None:
        noted = {name for effect in EFFECTS if not effect.refuse for name in effect.names}
        told = {
            name
            for name, info in ENGINE_SETTINGS.items()
            if "noted, not refused, so that sweeps over buffer_size work" in info.setting.help
        }
        assert told == noted

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
