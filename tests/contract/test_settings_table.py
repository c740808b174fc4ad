"""The settings as the outside knows them: names, defaults, accepted and refused values."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffulex.config import ENGINE_SETTINGS, Config, ConfigError
from diffulex.sampling_params import SamplingParams
from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.settings.spec import settings_of
from diffulex.settings.tables import main as tables_main
from tests.support.configs import make_config

ROOT = Path(__file__).parents[2]

# Every setting with its default. A change here is a change of the public interface.
PUBLIC: dict[str, object] = {
    # model
    "model": "",
    "tokenizer_path": None,
    "model_name": "dream",
    "mask_token_id": 151666,
    "trust_remote_code": False,
    # decoding
    "decoding_strategy": "d2f",
    "sampling_mode": "naive",
    "block_size": 32,
    "buffer_size": 4,
    "multi_block_prefix_full": True,
    "d2f_block_origin": "prompt",
    "d2f_reuse_prompt": True,
    "enable_remasking": False,
    "auto_max_nfe": False,
    "auto_max_nfe_warmup_steps": 8,
    "auto_max_nfe_tpf_floor": 1.0,
    "seed": 0,
    "activate_in_prefill": True,
    "overlap_store": True,
    "early_eos_stop": True,
    "skip_final_store": True,
    "skip_dummy_blocks": True,
    "needed_logits_only": True,
    "save_trace": False,
    # thresholds
    "add_block_threshold": 0.1,
    "semi_complete_threshold": 0.9,
    "accept_threshold": 0.9,
    "edit_threshold": 0.0,
    "remask_threshold": 0.4,
    "token_stability_threshold": 0.0,
    # scheduling
    "max_model_len": 2048,
    "max_num_batched_tokens": 4096,
    "max_num_reqs": 128,
    # cache
    "page_size": 32,
    "num_pages": -1,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "kv_cache_layout": "unified",
    "k_cache_hdim_split_factor_x": 8,
    # runtime
    "device": "auto",
    "dtype": "auto",
    "attn_impl": "triton_grouped",
    "enforce_eager": False,
    "enable_full_static_runner": True,
    "enable_torch_compile": True,
    "torch_compile_mode": "reduce-overhead",
    "enable_cudagraph_torch_compile": False,
    "enable_prefill_cudagraph": False,
    "prefill_cudagraph_max_len": 0,
    "enable_vllm_layers": True,
    "skip_warmup": False,
    "profiler_config": None,
    # parallel
    "tensor_parallel_size": 2,
    "data_parallel_size": 1,
    "master_addr": "localhost",
    "master_port": 2333,
    "distributed_backend": "nccl",
    "distributed_timeout_seconds": 600,
    "shm_name": "",
    "device_start": 0,
    "device_ids": (),
    # edit sampling and token merge
    "max_post_edit_steps": 16,
    "penalty_lambda": 0.0,
    "token_merge_mode": "dmax_topk",
    "token_merge_top_k": 1,
    "token_merge_renormalize": True,
    "token_merge_weight": 1.0,
    "dmax_sampler_fast_path": True,
    "dmax_force_prefill_active": False,
    "enable_vectorized_sampler": False,
    "enable_vectorized_sampler_compile": False,
    # experts
    "moe_gemm_impl": "triton",
    "expert_parallel_size": 1,
    "moe_dispatcher_backend": "standard",
    "deepep_mode": "auto",
    "deepep_num_max_dispatch_tokens_per_rank": 256,
    # DiffusionGemma
    "diffusion_gemma_max_denoising_steps": 48,
    "diffusion_gemma_stability_threshold": 2,
    "diffusion_gemma_confidence_threshold": 0.1,
    "diffusion_gemma_t_min": 0.0,
    "diffusion_gemma_t_max": 1.0,
    "diffusion_gemma_entropy_bound": 1.0,
    # Fast-dLLM v2
    "fdv2_use_block_cache": True,
    # LoRA
    "use_lora": False,
    "lora_path": "",
    "pre_merge_lora": False,
}

CHOICES: dict[str, set[object]] = {
    "model_name": {
        "dream", "sdar", "sdar_moe", "fast_dllm_v2", "llada", "llada2", "llada2_moe", "llada2_mini",
        "llada2dot1_mini", "llada2_mini_dmax", "diffusion_gemma", "diffucoder", "dream_reasoner",
        "stable_diffcoder",
    },
    "sampling_mode": {"naive", "edit"},
    "block_size": {4, 8, 16, 32, 256},
    "page_size": {4, 8, 16, 32, 256},
    "kv_cache_layout": {"unified", "distinct"},
    "attn_impl": {"triton_grouped", "triton", "naive"},
    "token_merge_mode": {"dmax_topk", "iter_smooth_topk"},
    "moe_gemm_impl": {"triton", "vllm", "vllm_modular", "naive"},
    "moe_dispatcher_backend": {"standard", "naive", "deepep"},
    "deepep_mode": {"auto", "normal", "low_latency"},
    "distributed_backend": {"nccl", "gloo"},
}  # fmt: skip

# Name -> values just outside what is documented.
INVALID: dict[str, tuple[object, ...]] = {
    "model": (None, 3),
    "tokenizer_path": (3,),
    "model_name": ("dreams", None),
    "decoding_strategy": ("foo", 3, None),
    "sampling_mode": ("greedy",),
    "mask_token_id": (-1, 1.5, "151666"),
    "tensor_parallel_size": (0, 9, 2.0),
    "data_parallel_size": (0, 1025),
    "expert_parallel_size": (0, 32769),
    "gpu_memory_utilization": (0, 1.5, -0.1, "0.9"),
    "max_model_len": (0, -1, "2048"),
    "max_num_batched_tokens": (0, 1.5),
    "max_num_reqs": (0, None),
    "block_size": (0, 5, 64, "16", True),
    "buffer_size": (0, -1, 1.5),
    "page_size": (0, 5, 64),
    "kv_cache_layout": ("paged",),
    "attn_impl": ("flash",),
    "enable_prefix_caching": (1, "true", None),
    "enforce_eager": (0,),
    "torch_compile_mode": ("fast",),
    "token_merge_mode": ("mean",),
    "token_merge_top_k": (0,),
    "token_merge_renormalize": (1,),
    "token_merge_weight": (-0.1,),
    "moe_gemm_impl": ("cutlass",),
    "max_post_edit_steps": (0,),
    "penalty_lambda": (-1.0,),
    "diffusion_gemma_max_denoising_steps": (0,),
    "diffusion_gemma_stability_threshold": (0,),
    "diffusion_gemma_confidence_threshold": (-0.1, 1.1),
    "diffusion_gemma_entropy_bound": (-0.1, 1.1),
    "diffusion_gemma_t_min": (-0.1,),
    "diffusion_gemma_t_max": (float("inf"),),
    "moe_dispatcher_backend": ("fancy",),
    "deepep_mode": ("fast",),
    "deepep_num_max_dispatch_tokens_per_rank": (0,),
    "master_addr": (5,),
    "master_port": (0, 65536, "2333"),
    "distributed_backend": ("mpi",),
    "distributed_timeout_seconds": (0, 1.5),
    "device_start": (-1,),
    "device_ids": ((-1,), ("0",)),
    "prefill_cudagraph_max_len": (-1,),
    "auto_max_nfe_warmup_steps": (0,),
    "auto_max_nfe_tpf_floor": (0, -1.0),
    "num_pages": (-2, 0, 1.5),
    "k_cache_hdim_split_factor_x": (0,),
    "profiler_config": ("torch", [1]),
    "add_block_threshold": (-0.1, 1.1),
    "semi_complete_threshold": (-0.1, 1.1),
    "accept_threshold": (-0.1, 1.1, float("nan")),
    "edit_threshold": (-0.1, 1.1),
    "remask_threshold": (-0.1, 1.1),
    "token_stability_threshold": (-0.1, 1.1),
    "d2f_block_origin": ("page",),
    "device": ("tpu",),
    "dtype": ("int8",),
    "seed": (-1,),
    "use_lora": ("yes",),
    "lora_path": (None,),
}


def test_the_public_names_and_defaults_are_frozen() -> None:
    found = {name: info.default for name, info in ENGINE_SETTINGS.items() if name != "decoding_thresholds"}
    assert found == PUBLIC
    assert all(type(found[name]) is type(PUBLIC[name]) for name in PUBLIC)


def test_help_says_what_confidence_is_and_when_the_stall_guard_ends_a_request() -> None:
    infos = {**settings_of(SamplingParams), **ENGINE_SETTINGS}
    helps = {name: info.setting.help for name, info in infos.items()}
    for name in ("temperature", "accept_threshold"):
        for words in ("softmax over the whole vocabulary", "temperature 1", "float32", "the lowest id"):
            assert words in helps[name]
        assert "unless it is the one the block is forced" in helps[name]
    assert "Only the draw sees the temperature" in helps["temperature"]
    assert "ends as stalled" in helps["auto_max_nfe_tpf_floor"]


def test_choices_are_the_documented_ones() -> None:
    assert {name: set(ENGINE_SETTINGS[name].setting.choices) for name in CHOICES} == CHOICES
    assert set(MODEL_DEFAULTS) == CHOICES["model_name"]


def test_every_setting_is_a_field_of_config_with_help() -> None:
    fields = {field.name for field in dataclasses.fields(Config) if field.init}
    assert fields == set(ENGINE_SETTINGS) | {"provenance"}
    assert all(info.setting.help.endswith(".") for info in ENGINE_SETTINGS.values())


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in INVALID.items() for value in values]
)
def test_a_value_outside_the_documented_ones_raises_naming_the_setting(
    checkpoint: Path, name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        make_config(checkpoint, **{name: value})
    assert isinstance(caught.value, ConfigError)
    assert any(problem.startswith(f"{name} must ") for problem in caught.value.problems)


def test_every_bounded_setting_has_an_invalid_value_in_this_test() -> None:
    bounded = {
        name
        for name, info in ENGINE_SETTINGS.items()
        if info.setting.choices or (info.setting.low, info.setting.above) != (None, None)
    }
    assert bounded <= set(INVALID)


def test_all_violations_are_reported_together(checkpoint: Path) -> None:
    faults: dict[str, Any] = {
        name: values[0] for name, values in INVALID.items() if name not in ("model", "model_name")
    }
    with pytest.raises(ConfigError) as caught:
        make_config(checkpoint, **faults)
    for name in faults:
        assert any(problem.startswith(f"{name} must ") for problem in caught.value.problems), name


PARTLY_LOADED = """
import sys
{statement}
loaded = {{name.split(".")[0] for name in sys.modules}}
assert not loaded & {{"torch", "transformers", "triton", "lm_eval", "datasets", "numpy"}}, loaded
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import diffulex",
        "import diffulex.config",
        "import diffulex.settings.sources, diffulex.settings.flags, diffulex.settings.tables",
        "import diffulex.settings.reference",
        "from diffulex import SamplingParams, get_logger, setup_logger, LoggerMixin; SamplingParams()",
        "import diffulex.profiling, diffulex.vllm_compat, diffulex.utils.device, diffulex.utils.registry",
        "from diffulex.config import Config, ConfigError\n"
        "try: Config(model='nowhere', block_size=5)\nexcept ConfigError: pass",
        "from diffulex.settings.sources import load_yaml\nload_yaml([], [], {})",
    ],
)
def test_reading_settings_loads_neither_torch_nor_transformers(statement: str) -> None:
    code = PARTLY_LOADED.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_naming_the_engine_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from diffulex import Diffulex, SamplingParams; Diffulex.__name__; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_flags_load_no_omegaconf() -> None:
    code = "import sys, diffulex.settings.flags, diffulex.config; assert 'omegaconf' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_package_has_five_lazy_public_names() -> None:
    import diffulex

    assert set(diffulex.__all__) == {
        "Diffulex",
        "SamplingParams",
        "get_logger",
        "setup_logger",
        "LoggerMixin",
    }
    assert set(diffulex.__all__) <= set(dir(diffulex))
    assert diffulex.SamplingParams.__module__ == "diffulex.sampling_params"
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        diffulex.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_settings_guide_is_up_to_date() -> None:
    assert tables_main(["--check", str(ROOT / "docs" / "settings.md")]) == 0
