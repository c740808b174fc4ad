"""Which settings have an effect only together with others, as a table; written in vain, they are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diffulex.settings.availability import FEATURES
from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffulex.settings.draft import Draft, Values

__all__ = ["EFFECTS", "Effect", "check_effects"]


@dataclass(frozen=True, slots=True)
class Effect:
    """Settings that are read only while `holds`; `needs` says so in words.

    Another value than the default that the user wrote in vain is refused, or only noted in the log where a
    person would change just the other setting from run to run (`refuse` False; the help of these settings
    says so). `exists` False means that this version has nothing that would read them.
    """

    names: tuple[str, ...]
    needs: str
    holds: Callable[[Values], bool]
    refuse: bool = True
    exists: bool = True

    def sentence(self, name: str, value: object) -> str:
        """What is wrong with this value of the setting, and the next step."""
        if not self.exists:
            return (
                f"{name}={value!r} has no effect in this version, which has no {self.needs}; "
                f"leave {name} unset"
            )
        return f"{name}={value!r} has no effect without {self.needs}; set that or leave {name} unset"


def _is(name: str, *wanted: object) -> Callable[[Values], bool]:
    return lambda values: values[name] in wanted


def _strategy(*names: str) -> Callable[[Values], bool]:
    """True for these strategies, and for strategies of others, which may read what they like."""
    return lambda values: (
        values["decoding_strategy"] in names or values["decoding_strategy"] not in STRATEGY_DEFAULTS
    )


def _has_experts(values: Values) -> bool:
    return MODEL_DEFAULTS[values["model_name"]].has_experts


def _many_ranks(values: Values) -> bool:
    sizes = ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size")
    return any(values[name] > 1 for name in sizes)


def _edits(values: Values) -> bool:
    return bool(values["sampling_mode"] == "edit" or values["decoding_strategy"] not in STRATEGY_DEFAULTS)


EFFECTS: Final = (
    Effect(
        ("max_post_edit_steps", "penalty_lambda", "edit_threshold"),
        "sampling_mode='edit'",
        _edits,
    ),
    Effect(("remask_threshold",), "enable_remasking=True", _is("enable_remasking", True)),
    Effect(("enable_remasking",), "sampling_mode='edit'", _edits),
    Effect(
        (
            "token_merge_mode",
            "token_merge_top_k",
            "token_merge_renormalize",
            "token_merge_weight",
            "dmax_sampler_fast_path",
            "dmax_force_prefill_active",
        ),
        "decoding_strategy='dmax'",
        _strategy("dmax"),
    ),
    Effect(("d2f_block_origin", "d2f_reuse_prompt"), "decoding_strategy='d2f'", _strategy("d2f")),
    Effect(("fdv2_use_block_cache",), "decoding_strategy='fast_dllm_v2'", _strategy("fast_dllm_v2")),
    Effect(
        (
            "diffusion_gemma_max_denoising_steps",
            "diffusion_gemma_stability_threshold",
            "diffusion_gemma_confidence_threshold",
            "diffusion_gemma_t_min",
            "diffusion_gemma_t_max",
            "diffusion_gemma_entropy_bound",
        ),
        "model_name='diffusion_gemma'",
        _is("model_name", "diffusion_gemma"),
    ),
    Effect(
        ("auto_max_nfe_warmup_steps", "auto_max_nfe_tpf_floor"),
        "auto_max_nfe=True",
        _is("auto_max_nfe", True),
    ),
    Effect(("overlap_store",), "buffer_size=1", _is("buffer_size", 1), refuse=False),
    Effect(
        ("add_block_threshold", "semi_complete_threshold", "token_stability_threshold"),
        "buffer_size above 1",
        lambda values: bool(values["buffer_size"] > 1),
        refuse=False,
    ),
    Effect(("lora_path", "pre_merge_lora"), "use_lora=True", _is("use_lora", True)),
    Effect(
        ("moe_gemm_impl", "moe_dispatcher_backend", "expert_parallel_size"),
        "a model with experts",
        _has_experts,
    ),
    Effect(
        ("deepep_mode", "deepep_num_max_dispatch_tokens_per_rank"),
        "moe_dispatcher_backend='deepep'",
        _is("moe_dispatcher_backend", "deepep"),
    ),
    Effect(
        ("master_addr", "master_port", "distributed_backend", "distributed_timeout_seconds"),
        "a parallel size above 1",
        _many_ranks,
    ),
    Effect(("shm_name",), "shared memory between ranks", lambda _: False, exists=False),
    Effect(("skip_warmup",), "warm-up", _strategy(), exists=False),
    Effect(("enforce_eager",), "graphs and no compilation", _strategy(), exists=False),
    Effect(
        ("device_start", "device_ids"),
        "device='cuda'",
        _is("device", "cuda", "auto"),
    ),
    Effect(("device_start",), "device_ids to be empty", _is("device_ids", ())),
    Effect(
        ("k_cache_hdim_split_factor_x",), "kv_cache_layout='distinct'", _is("kv_cache_layout", "distinct")
    ),
    Effect(("torch_compile_mode",), "enable_torch_compile=True", _is("enable_torch_compile", True)),
    Effect(
        ("prefill_cudagraph_max_len",), "enable_prefill_cudagraph=True", _is("enable_prefill_cudagraph", True)
    ),
)

# A value that a machine without anything runs with is not in vain: it says what happens.
_PLAIN: Final = {feature.name: feature.plain[:1] for feature in FEATURES}


def check_effects(draft: Draft, effects: Sequence[Effect] = EFFECTS) -> None:
    """Refuse values other than the default that the user wrote and that nothing reads."""
    for effect in effects:
        in_vain = [name for name in effect.names if _is_in_vain(draft, name)]
        if not in_vain or draft.is_broken("model_name", "decoding_strategy") or effect.holds(draft.values):
            continue
        for name in in_vain:
            value = draft.values[name]
            text = effect.sentence(name, value)
            if effect.refuse:
                draft.refuse(name, text)
            else:
                draft.note(text)


def _is_in_vain(draft: Draft, name: str) -> bool:
    value = draft.values[name]
    return (
        name in draft.explicit
        and value != draft.defaults[name]
        and value not in _PLAIN.get(name, ())
        and not draft.is_broken(name)
    )
