"""PEFT adapter folders made on the fly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def linear_modules(model: Path, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the modules of a checkpoint whose paths end with one of `names`."""
    endings = tuple(f".{name}.weight" for name in names)
    weights = load_file(model / "model.safetensors")
    return {
        key.removesuffix(".weight"): tuple(w.shape) for key, w in weights.items() if key.endswith(endings)
    }


def write_adapter(
    folder: Path,
    model: Path,
    names: Iterable[str] = ATTENTION,
    *,
    rank: int = 3,
    ranks: dict[str, int] | None = None,
    adapter_name: str = "",
    seed: int = 7,
    **config: Any,
) -> Path:
    """An adapter for all modules of `model` with these names; `config` replaces keys of adapter_config.json.

    `ranks` gives modules whose paths end with a name another rank than `rank`.
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    middle = f".{adapter_name}" if adapter_name else ""
    names = list(names)
    for module, (num_rows, num_columns) in linear_modules(model, names).items():
        own = next((r for name, r in (ranks or {}).items() if module.endswith(name)), rank)
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A{middle}.weight"] = torch.randn(own, num_columns, generator=draw) * 0.3
        tensors[f"{prefix}.lora_B{middle}.weight"] = torch.randn(num_rows, own, generator=draw) * 0.3
    stated = {
        "peft_type": "LORA",
        "base_model_name_or_path": "somebody/some-base",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "r": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": names,
        "use_dora": False,
        "use_rslora": False,
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add, or with None remove tensors of an adapter; names without ``base_model.model.``."""
    path = folder / "adapter_model.safetensors"
    tensors = {**load_file(path), **{f"base_model.model.{name}": tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
