"""What this version and this machine can do, as a table: values that are refused or, as defaults, lowered.

A default that needs hardware is a wish: where it cannot be had it is lowered and one log line says so. The
same value written by the user is an error. Whoever makes a value work opens its row.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.settings.draft import Draft

__all__ = [
    "AVAILABLE_MODELS",
    "AVAILABLE_STRATEGIES",
    "FEATURES",
    "Feature",
    "apply_features",
    "choose_device",
    "refuse_unavailable_model",
]

Need = Literal["cuda", "devices", "vllm"]

AVAILABLE_MODELS: Final = (
    "dream", "diffucoder", "dream_reasoner", "llada", "fast_dllm_v2", "stable_diffcoder", "sdar",
    "sdar_moe", "llada2", "llada2_moe", "llada2_mini",
)  # fmt: skip
AVAILABLE_STRATEGIES: Final = ("multi_bd",)
AVAILABLE_SAMPLING_MODES: Final = ("naive",)


@dataclass(frozen=True, slots=True)
class Feature:
    """Values of one setting that need more than any machine has.

    `plain` are the values that always work; the first of them replaces a default that cannot be had. `ready`
    says that the others are built, `need` what they need of the machine. `works_on_cpu` says that the CPU
    runs them when the user writes them, never by default.
    """

    name: str
    plain: tuple[object, ...]
    ready: bool = False
    need: Need | None = None
    works_on_cpu: bool = False


FEATURES: Final = (
    Feature("tensor_parallel_size", (1,), need="devices", works_on_cpu=True),
    Feature("data_parallel_size", (1,)),
    Feature("expert_parallel_size", (1,)),
    Feature("distributed_backend", ("gloo",), ready=True, need="cuda"),
    Feature("attn_impl", ("naive",), need="cuda"),
    Feature("moe_gemm_impl", ("naive",), need="cuda"),
    Feature("moe_dispatcher_backend", ("standard", "naive")),
    Feature("enable_full_static_runner", (False,), need="cuda"),
    Feature("enable_torch_compile", (False,), need="cuda"),
    Feature("enable_cudagraph_torch_compile", (False,), need="cuda"),
    Feature("enable_prefill_cudagraph", (False,), need="cuda"),
    Feature("enable_vectorized_sampler_compile", (False,), need="cuda"),
    Feature("enable_vllm_layers", (False,), need="vllm"),
    Feature("sampling_mode", AVAILABLE_SAMPLING_MODES),
    Feature("enable_remasking", (False,)),
)

_NEEDS: Final[dict[Need, str]] = {
    "cuda": "a CUDA device",
    "devices": "as many CUDA devices",
    "vllm": "the package vllm",
}
_NOT_YET: Final = "is not available yet in this version"


def refuse_unavailable_model(draft: Draft) -> None:
    """Record a problem when the model family or the strategy does not run yet; one sentence for both."""
    if draft.is_broken("model_name", "decoding_strategy"):
        return
    name, strategy = draft.values["model_name"], draft.values["decoding_strategy"]
    runs = strategy in AVAILABLE_STRATEGIES or strategy not in STRATEGY_DEFAULTS
    if name in AVAILABLE_MODELS and runs:
        return
    model = f"model_name={name!r}" + ("" if "model_name" in draft.explicit else " (the default)")
    modes = MODEL_DEFAULTS[name].sampling_modes
    if not set(modes) & set(AVAILABLE_SAMPLING_MODES):
        draft.refuse(
            "sampling_mode",
            f"{model} decodes with sampling_mode={' or '.join(map(repr, modes))}, which {_NOT_YET}; "
            f"use model_name={' or '.join(map(repr, AVAILABLE_MODELS))}",
        )
        return
    others = [one for one in MODEL_DEFAULTS[name].strategies if one in AVAILABLE_STRATEGIES]
    if name in AVAILABLE_MODELS and others:
        is_own = "decoding_strategy" not in draft.explicit
        draft.refuse(
            "decoding_strategy",
            f"decoding_strategy={strategy!r}{f', the default of {model},' if is_own else f' with {model}'} "
            f"{_NOT_YET}; write decoding_strategy={' or '.join(map(repr, others))}",
        )
        return
    draft.refuse(
        "model_name" if name not in AVAILABLE_MODELS else "decoding_strategy",
        f"{model} with decoding_strategy={strategy!r} {_NOT_YET}; "
        f"use model_name={' or '.join(map(repr, AVAILABLE_MODELS))} "
        f"with decoding_strategy={' or '.join(map(repr, AVAILABLE_STRATEGIES))}",
    )


def choose_device(draft: Draft) -> None:
    """`device` names what is used instead of "auto"; CUDA that is not there is refused.

    With broken rules the machine is not asked, since nothing will run.
    """
    if draft.values["device"] == "auto" and not draft.problems:
        found = draft.hardware().has_cuda
        origin = "auto: this machine has CUDA" if found else "auto: this machine has no CUDA device"
        draft.set("device", "cuda" if found else "cpu", origin)
    elif draft.values["device"] == "cuda" and not draft.hardware().has_cuda:
        draft.refuse(
            "device",
            "device='cuda' needs a CUDA device and this machine has none; use 'cpu' or leave it unset",
        )


def apply_features(draft: Draft, features: Sequence[Feature] = FEATURES) -> None:
    """Lower the defaults this machine or version cannot fulfil, and refuse the same values where demanded."""
    lowered: dict[str, list[str]] = {}
    for feature in features:
        value = draft.values[feature.name]
        if value in feature.plain or draft.is_broken(feature.name):
            continue
        if draft.is_demand(feature.name):
            if feature.works_on_cpu and draft.values["device"] == "cpu":
                continue
            _refuse_demand(draft, feature, value)
            continue
        if not feature.ready:
            reason: str | None = _NOT_YET
        else:
            reason = None if draft.problems else _missing(draft, feature, value)
        if reason is not None:
            draft.set(feature.name, feature.plain[0], f"default {value} lowered: {_short(reason)}")
            lowered.setdefault(_short(reason), []).append(f"{feature.name} {value} -> {feature.plain[0]}")
    if lowered:
        parts = [f"{reason}: {', '.join(changes)}" for reason, changes in lowered.items()]
        draft.note(f"defaults lowered ({'; '.join(parts)})", level=logging.INFO)


def _refuse_demand(draft: Draft, feature: Feature, value: object) -> None:
    missing = _missing(draft, feature, value)
    reasons = [] if missing is None else [missing]
    if not feature.ready:
        reasons.append(_NOT_YET)
    if reasons:
        plain = " or ".join(f"{feature.name}={one!r}" for one in feature.plain)
        has_wish = draft.defaults[feature.name] not in feature.plain
        way_out = f"use {plain}" + (" or leave it unset" if has_wish else "")
        draft.refuse(feature.name, f"{feature.name}={value!r} {' and '.join(reasons)}; {way_out}")


def _missing(draft: Draft, feature: Feature, value: object) -> str | None:
    """What the machine lacks for this value, or None."""
    if feature.need is None:
        return None
    if feature.need == "vllm":
        return None if draft.hardware().has_vllm else f"needs {_NEEDS['vllm']}, which is not installed"
    if draft.values["device"] == "cpu" and "device" in draft.explicit:
        return f"needs {_NEEDS['cuda']} and device is 'cpu'"
    machine = draft.hardware()
    if not machine.has_cuda or draft.values["device"] == "cpu":
        return f"needs {_NEEDS['cuda']} and this machine has none"
    if feature.need == "devices" and isinstance(value, int) and value > machine.device_count:
        return f"needs {_NEEDS['devices']} and this machine has {machine.device_count}"
    return None


def _short(reason: str) -> str:
    """A reason as it reads in front of a list."""
    return reason.removeprefix("is ")
