"""What each model family and each decoding strategy defaults, forces and allows, as data."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MODEL_DEFAULTS",
    "STRATEGY_DEFAULTS",
    "ForceRule",
    "ModelDefaults",
    "StrategyDefaults",
    "registered_strategies",
]

# Who may fill its best position when none passes accept_threshold. neighbour: blocks whose left neighbour is
# semi-complete or absent. grounded: those whose left neighbour is semi-complete, and block 0. always: every
# open block.
ForceRule = Literal["neighbour", "grounded", "always"]


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """One model family.

    `settings` are its defaults, below anything the user writes. `shift_logits` says that the row of position
    i - 1 predicts position i.
    """

    strategies: tuple[str, ...]
    default_strategy: str
    shift_logits: bool
    force_rule: ForceRule
    sampling_modes: tuple[str, ...] = ("naive",)
    has_experts: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StrategyDefaults:
    """One decoding strategy: settings it fixes whatever the user writes, and sampling modes it works with.

    `takes_trained_block` says that an unset block_size becomes the block the checkpoint was trained with.
    """

    forces: Mapping[str, object] = field(default_factory=dict)
    sampling_modes: tuple[str, ...] = ("naive",)
    takes_trained_block: bool = False


_D2F: Final = ("d2f", "multi_bd")
_BOTH_MODES: Final = ("naive", "edit")

MODEL_DEFAULTS: Final[Mapping[str, ModelDefaults]] = {
    "dream": ModelDefaults(_D2F, "d2f", shift_logits=True, force_rule="neighbour"),
    "diffucoder": ModelDefaults(_D2F, "d2f", shift_logits=True, force_rule="neighbour"),
    "dream_reasoner": ModelDefaults(("multi_bd",), "multi_bd", shift_logits=False, force_rule="neighbour"),
    "sdar": ModelDefaults(("multi_bd",), "multi_bd", shift_logits=False, force_rule="grounded"),
    "sdar_moe": ModelDefaults(
        ("multi_bd",), "multi_bd", shift_logits=False, force_rule="grounded", has_experts=True
    ),
    "stable_diffcoder": ModelDefaults(("multi_bd",), "multi_bd", shift_logits=False, force_rule="always"),
    "fast_dllm_v2": ModelDefaults(
        ("fast_dllm_v2", "multi_bd"), "fast_dllm_v2", shift_logits=True, force_rule="neighbour"
    ),
    "llada": ModelDefaults(_D2F, "d2f", shift_logits=False, force_rule="grounded"),
    **{
        name: ModelDefaults(
            ("multi_bd", "dmax"),
            "multi_bd",
            shift_logits=False,
            force_rule="neighbour",
            sampling_modes=_BOTH_MODES,
            has_experts=True,
        )
        for name in ("llada2", "llada2_moe", "llada2_mini")
    },
    "llada2dot1_mini": ModelDefaults(
        ("multi_bd", "dmax"),
        "multi_bd",
        shift_logits=False,
        force_rule="neighbour",
        sampling_modes=("edit",),
        has_experts=True,
        settings={"sampling_mode": "edit"},
    ),
    "llada2_mini_dmax": ModelDefaults(
        ("dmax",),
        "dmax",
        shift_logits=False,
        force_rule="neighbour",
        sampling_modes=("edit",),
        has_experts=True,
        settings={"sampling_mode": "edit"},
    ),
    "diffusion_gemma": ModelDefaults(
        ("diffusion_gemma",), "diffusion_gemma", shift_logits=False, force_rule="neighbour", has_experts=True
    ),
}

STRATEGY_DEFAULTS: Final[Mapping[str, StrategyDefaults]] = {
    # What d2f caches for a prompt position depends on the whole prompt, so beginnings cannot be shared.
    "d2f": StrategyDefaults({"multi_block_prefix_full": True, "enable_prefix_caching": False}),
    "multi_bd": StrategyDefaults(
        {"multi_block_prefix_full": False}, sampling_modes=_BOTH_MODES, takes_trained_block=True
    ),
    "dmax": StrategyDefaults(
        {"multi_block_prefix_full": False}, sampling_modes=("edit",), takes_trained_block=True
    ),
    "diffusion_gemma": StrategyDefaults(
        {"multi_block_prefix_full": False, "block_size": 256, "page_size": 256, "buffer_size": 1}
    ),
    "fast_dllm_v2": StrategyDefaults({"multi_block_prefix_full": False, "enable_prefix_caching": True}),
}


def registered_strategies() -> tuple[str, ...]:
    """Names of all strategies that have a request class, built-in or registered by the program.

    This imports the engine, and with it torch, so it is asked only about names outside this table.
    """
    importlib.import_module("diffulex.strategy")
    requests = importlib.import_module("diffulex.engine.request")
    names: tuple[str, ...] = requests.AutoReq.names()
    return names
